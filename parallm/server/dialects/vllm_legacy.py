"""vLLM's first `/generate`, as Atropos' VLLMServer asks for it: `prompt` is an object that holds `prompt_token_ids`.

Its clients take tokens and log-probs from `logprobs`, where the sampled token comes first, and know no aborted
completion: an abort is an error here.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.catalog import version_of
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body, vllm_refusal, vllm_sampling_fields
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import CompletionBody, WeightVersions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import Wire, checked, is_tokens
from parallm.types import Completion, PromptLogprob

Position = list[dict[str, float]]
"""One object in a list: log-probs by token id, the sampled one first."""


class LegacyControls(Wire):
    """Fields of the request that have nothing to do with sampling."""

    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the request is given up."""


class LegacyAnswer(Wire):
    text: list[str]
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[Position]] | None
    prompt_logprobs: list[dict[str, float] | None] | None
    """Log-probs by token id at each position, the prompt's own token first; null for the first position."""
    logprobs_mode: Literal["temperature"]
    request_id: str
    step_id: int | str | None
    model: str
    policy_versions: list[int | None]
    weight_versions: list[list[WeightVersions]]


class LegacyBuilder:
    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> LegacyAnswer:
        choices = completions[0]
        if any(choice.finish_reason == "abort" for choice in choices):
            raise Unavailable("the request was aborted by its id or by /pause; send it again if it is still wanted")
        prompt = self.context.requests[0].prompt_tokens
        return LegacyAnswer(
            text=[choice.text for choice in choices],
            prompt=self.context.tokenizer.decode(prompt, special=True),
            prompt_token_ids=list(prompt),
            token_ids=[list(choice.tokens) for choice in choices],
            finish_reasons=[choice.finish_reason for choice in choices],
            logprobs=None if self._body.logprobs is None else [_positions(choice) for choice in choices],
            prompt_logprobs=_prompt_logprobs(choices[0], self._body.prompt_logprobs),
            logprobs_mode="temperature",
            request_id=self._body.request_id or self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            policy_versions=[version_of(choice) for choice in choices],
            weight_versions=[weight_versions(choice) for choice in choices],
        )


def _positions(completion: Completion) -> list[Position]:
    tops = completion.top_logprobs or ((),) * len(completion.tokens)
    return [
        [
            {str(token): finite(logprob)}
            | {str(likely.token): finite(likely.logprob) for likely in top if likely.token != token}
        ]
        for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]


def _prompt_logprobs(completion: Completion, limit: int | None) -> list[dict[str, float] | None] | None:
    if limit is None or completion.prompt_logprobs is None:
        return None
    # not wrapped in lists as `logprobs` is: Atropos would take those for several prompts
    return [None if token is None else _prompt_position(token, limit) for token in completion.prompt_logprobs]


def _prompt_position(token: PromptLogprob, limit: int) -> dict[str, float]:
    others = {str(other.token): finite(other.logprob) for other in token.top[:limit] if other.token != token.token}
    return {str(token.token): finite(token.logprob)} | others


def read(value: Mapping[str, Any]) -> DialectRequest:
    prompt = value["prompt"]
    tokens = prompt.get("prompt_token_ids")
    if len(prompt) != 1 or not is_tokens(tokens):
        raise InvalidRequest('prompt should be a text or {"prompt_token_ids": [...]} and nothing else', "prompt")
    controls = checked({"timeout": value.get("timeout")}, LegacyControls)
    params = {name: item for name, item in value.items() if name not in ("prompt", "timeout")}
    body = completion_body(vllm_sampling_fields(params, has_text=True) | {"prompt": tokens}, has_prompt_logprobs=True)
    if body.stream:
        raise InvalidRequest("this body gets no stream here; send token ids to /v1/completions", "stream")
    return DialectRequest(
        body=body, whole=lambda context: LegacyBuilder(context, body), timeout_seconds=controls.timeout
    )


VLLM_LEGACY = Dialect(name="vllm legacy", read=read, refusal=vllm_refusal)
