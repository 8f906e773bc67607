"""vLLM's first `/generate`, as Atropos' VLLMServer asks for it: `prompt` is an object that holds `prompt_token_ids`.

Its clients take tokens and log-probs from `logprobs`, where the sampled token comes first, and know no aborted
completion: an abort is an error here.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body, refusal, sampling_fields
from parallm.server.generation import ResponseContext, version_of, weight_versions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import CompletionBody, WeightVersions, Wire, checked, is_tokens
from parallm.types import Completion, PromptLogprob

Position = list[dict[str, float]]
"""One object in a list: log-probs by token id, the sampled one first."""


class LegacyControls(Wire):
    """The fields that are about the request and not about sampling."""

    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds."""


class LegacyAnswer(Wire):
    text: list[str]
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[Position]] | None
    prompt_logprobs: list[dict[str, float] | None] | None
    """By position of the prompt: null for the first, else log-probs by token id, its own first."""
    logprobs_mode: Literal["temperature"]
    request_id: str
    step_id: int | str | None
    model: str
    policy_versions: list[int | None]
    weight_versions: list[list[WeightVersions]]


class LegacyAnswers:
    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> LegacyAnswer:
        made = completions[0]
        if any(one.finish_reason == "abort" for one in made):
            raise Unavailable("the request was aborted by its id or by /pause; send it again if it is still wanted")
        prompt = self.context.requests[0].prompt_tokens
        return LegacyAnswer(
            text=[one.text for one in made],
            prompt=self.context.tokenizer.decode(prompt, special=True),
            prompt_token_ids=list(prompt),
            token_ids=[list(one.tokens) for one in made],
            finish_reasons=[one.finish_reason for one in made],
            logprobs=None if self._body.logprobs is None else [positions(one) for one in made],
            prompt_logprobs=_of_prompt(made[0], self._body.prompt_logprobs),
            logprobs_mode="temperature",
            request_id=self._body.request_id or self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            policy_versions=[version_of(one) for one in made],
            weight_versions=[weight_versions(one) for one in made],
        )


def positions(completion: Completion) -> list[Position]:
    tops = completion.top_logprobs or ((),) * len(completion.tokens)
    return [
        [{str(token): finite(logprob)} | {str(one.token): finite(one.logprob) for one in top if one.token != token}]
        for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]


def _of_prompt(completion: Completion, most: int | None) -> list[dict[str, float] | None] | None:
    if most is None or completion.prompt_logprobs is None:
        return None
    # not wrapped in lists as `logprobs` is: Atropos would take those for several prompts
    return [None if one is None else _position(one, most) for one in completion.prompt_logprobs]


def _position(one: PromptLogprob, most: int) -> dict[str, float]:
    others = {str(other.token): finite(other.logprob) for other in one.top[:most] if other.token != one.token}
    return {str(one.token): finite(one.logprob)} | others


def read(value: Mapping[str, Any]) -> DialectRequest:
    prompt = value["prompt"]
    tokens = prompt.get("prompt_token_ids")
    if len(prompt) != 1 or not is_tokens(tokens):
        raise InvalidRequest('prompt should be a text or {"prompt_token_ids": [...]} and nothing else', "prompt")
    controls = checked({"timeout": value.get("timeout")}, LegacyControls)
    rest = {name: item for name, item in value.items() if name not in ("prompt", "timeout")}
    body = completion_body(sampling_fields(rest, has_text=True) | {"prompt": tokens}, has_prompt_logprobs=True)
    if body.stream:
        raise InvalidRequest("this body gets no stream here; send token ids to /v1/completions", "stream")
    return DialectRequest(
        body=body, whole=lambda context: LegacyAnswers(context, body), timeout_seconds=controls.timeout
    )


LEGACY_VLLM = Dialect(name="vllm legacy", read=read, refusal=refusal)
