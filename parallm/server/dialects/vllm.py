"""vLLM's first `/generate`, as Atropos' VLLMServer asks for it, and its `/inference/v1/generate`.

The first has a `prompt` that is an object with `prompt_token_ids`. Its clients take tokens and log-probs from
`logprobs`, where the sampled token comes first, and know no aborted completion: an abort is an error here. The second
takes and gives token ids, as renderers, prime-rl and SkyRL ask for it.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.catalog import version_of
from parallm.server.dialects.dialect import (
    Dialect,
    DialectRequest,
    completion_body,
    positions,
    vllm_refusal,
    vllm_sampling_fields,
)
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import CompletionBody, RankedLogprob, Usage, WeightVersions
from parallm.server.openai.logprobs import PromptLogprobs, finite, prompt_logprobs
from parallm.server.schemas import Tokens, Wire, checked, is_tokens
from parallm.types import Completion, PromptLogprob, TopLogprob

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
            logprobs=None if self._body.logprobs is None else [_legacy_logprobs(choice) for choice in choices],
            prompt_logprobs=_prompt_logprobs(choices[0], self._body.prompt_logprobs),
            logprobs_mode="temperature",
            request_id=self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            policy_versions=[version_of(choice) for choice in choices],
            weight_versions=[weight_versions(choice) for choice in choices],
        )


def _legacy_logprobs(completion: Completion) -> list[Position]:
    return [[{str(token): logprob for token, logprob in tokens.items()}] for tokens in positions(completion)]


def _prompt_logprobs(completion: Completion, limit: int | None) -> list[dict[str, float] | None] | None:
    if limit is None or completion.prompt_logprobs is None:
        return None
    # not wrapped in lists as `logprobs` is: Atropos would take those for several prompts
    return [None if token is None else _prompt_position(token, limit) for token in completion.prompt_logprobs]


def _prompt_position(token: PromptLogprob, limit: int) -> dict[str, float]:
    others = {str(other.token): finite(other.logprob) for other in token.top[:limit] if other.token != token.token}
    return {str(token.token): finite(token.logprob)} | others


def read_legacy(value: Mapping[str, Any]) -> DialectRequest:
    prompt = value["prompt"]
    tokens = prompt.get("prompt_token_ids")
    if len(prompt) != 1 or not is_tokens(tokens):
        raise InvalidRequest('prompt should be a text or {"prompt_token_ids": [...]} and nothing else', "prompt")
    controls = checked({"timeout": value.get("timeout")}, LegacyControls)
    params = {name: item for name, item in value.items() if name not in ("prompt", "timeout")}
    body = completion_body(vllm_sampling_fields(params, has_text=True) | {"prompt": tokens}, has_prompt_logprobs=True)
    return DialectRequest(
        body=body, whole=lambda context: LegacyBuilder(context, body), timeout_seconds=controls.timeout
    )


VLLM_LEGACY = Dialect(name="vllm legacy", read=read_legacy, refusal=vllm_refusal)


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "features": (),
    "kv_transfer_params": (),
    "stream": (False,),
    "stream_options": (),
}


class TokensBody(Wire):
    model: str
    token_ids: Tokens
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    priority: int = 0
    request_id: str | None = None
    step_id: int | str | None = None
    return_token_ids: bool = False
    """Token ids are in the answer in any case."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes; versions never share them."""


class TokensLogprob(Wire):
    token: str
    """`token_id:5`, as renderers reads it; vLLM itself gives the number below."""
    token_id: int
    logprob: float
    rank: int | None
    """Null unless the token is among the most likely ones that were asked for."""
    bytes: None = None
    top_logprobs: list["TokensLogprob"]


class TokensLogprobs(Wire):
    content: list[TokensLogprob]


class TokensChoice(Wire):
    index: int
    finish_reason: str
    token_ids: list[int]
    logprobs: TokensLogprobs | None
    routed_experts: None
    policy_version: int | None
    weight_versions: list[WeightVersions]


class TokensAnswer(Wire):
    request_id: str
    step_id: int | str | None
    model: str
    created: int
    choices: list[TokensChoice]
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None
    prompt_token_ids: list[int]
    logprobs_mode: Literal["temperature"]
    usage: Usage


class TokensBuilder:
    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> TokensAnswer:
        return TokensAnswer(
            request_id=self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            created=self.context.created,
            choices=[self._choice(completion) for completion in completions[0]],
            prompt_logprobs=self._prompt_logprobs(completions[0][0]),
            prompt_token_ids=list(self.context.requests[0].prompt_tokens),
            logprobs_mode="temperature",
            usage=self.context.whole_usage(completions),
        )

    def _prompt_logprobs(self, completion: Completion) -> PromptLogprobs | None:
        limit = self._body.prompt_logprobs
        if limit is None or completion.prompt_logprobs is None:
            return None
        return prompt_logprobs(completion.prompt_logprobs, limit, self.context.token_text)

    def _choice(self, completion: Completion) -> TokensChoice:
        return TokensChoice(
            index=completion.index,
            finish_reason=completion.finish_reason,
            token_ids=list(completion.tokens),
            logprobs=None if self._body.logprobs is None else _token_logprobs(completion),
            routed_experts=None,
            policy_version=version_of(completion),
            weight_versions=weight_versions(completion),
        )


def _token_logprobs(completion: Completion) -> TokensLogprobs:
    tops = completion.top_logprobs or ((),) * len(completion.tokens)
    content = []
    for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True):
        alternatives = [_entry(likely.token, likely.logprob, rank) for rank, likely in enumerate(top, 1)]
        content.append(_entry(token, logprob, _rank(token, top), alternatives))
    return TokensLogprobs(content=content)


def _entry(token: int, logprob: float, rank: int | None, top: Sequence[TokensLogprob] = ()) -> TokensLogprob:
    name = f"token_id:{token}"
    return TokensLogprob(
        token=name, token_id=token, logprob=finite(logprob), rank=rank, bytes=None, top_logprobs=list(top)
    )


def _rank(token: int, top: Sequence[TopLogprob]) -> int | None:
    return next((rank for rank, likely in enumerate(top, 1) if likely.token == token), None)


def read_token_ids(value: Mapping[str, Any]) -> DialectRequest:
    own = checked(value, TokensBody, NEUTRAL)
    if "prompt" in own.sampling_params or "model" in own.sampling_params:
        raise InvalidRequest("sampling_params holds no prompt and no model", "sampling_params")
    fields = vllm_sampling_fields(own.sampling_params, has_text=False) | {
        "model": own.model,
        "prompt": own.token_ids,
        "priority": own.priority,
        "cache_salt": own.cache_salt,
        "request_id": own.request_id,
        "step_id": own.step_id,
    }
    body = completion_body(fields, has_prompt_logprobs=True)
    return DialectRequest(body=body, whole=lambda context: TokensBuilder(context, body))


VLLM_TOKENS = Dialect(name="token in, token out", read=read_token_ids, refusal=vllm_refusal)
