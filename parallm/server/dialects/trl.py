"""TRL's `/generate/`, as its VLLMClient asks for it: `prompts` are texts or lists of token ids."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body, positions, vllm_sampling_fields
from parallm.server.failures import Failure
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import WeightVersions, read_prompts
from parallm.server.schemas import Wire, checked
from parallm.types import Completion

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "images": ([],),
    "truncate_prompt_tokens": (),
}
RENAMED = {"guided_decoding_regex": "guided_regex", "structured_outputs_regex": "guided_regex"}


class TrlBody(Wire):
    """Fields of TRL alone; all others have the names of `/v1/completions`."""

    prompts: Annotated[list[str | list[int]], PlainValidator(read_prompts)]
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's SamplingParams, which win over those of the body."""


class TrlAnswer(Wire):
    prompt_ids: list[list[int]]
    """One for each prompt; the other lists have one item for each completion."""
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    """Log-probs at each position: the sampled token and the most likely ones, likeliest first."""
    logprob_token_ids: list[list[list[int]]] | None
    finish_reasons: list[str]
    weight_versions: list[list[WeightVersions]]


class TrlRefusal(Wire):
    detail: str


class TrlBuilder:
    def __init__(self, context: ResponseContext, *, has_logprobs: bool) -> None:
        self.context = context
        self._has_logprobs = has_logprobs

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> TrlAnswer:
        flat = [completion for group in completions for completion in group]
        ranked = [
            [sorted(tokens.items(), key=lambda pair: -pair[1]) for tokens in positions(completion)]
            for completion in flat
        ]
        logprobs = [[[logprob for _, logprob in tokens] for tokens in own] for own in ranked]
        token_ids = [[[token for token, _ in tokens] for tokens in own] for own in ranked]
        return TrlAnswer(
            prompt_ids=[list(request.prompt_tokens) for request in self.context.requests],
            completion_ids=[list(completion.tokens) for completion in flat],
            logprobs=logprobs if self._has_logprobs else None,
            logprob_token_ids=token_ids if self._has_logprobs else None,
            finish_reasons=[completion.finish_reason for completion in flat],
            weight_versions=[weight_versions(completion) for completion in flat],
        )


def read(value: Mapping[str, Any]) -> DialectRequest:
    own = {name: value[name] for name in ("prompts", "generation_kwargs", *NEUTRAL) if name in value}
    asked = checked(own, TrlBody, NEUTRAL)
    # TRL wants the log-probs of the sampled tokens without the field, and none with null
    others = {RENAMED.get(name, name): item for name, item in value.items() if name not in own}
    params = {"logprobs": 0} | others | asked.generation_kwargs
    body = completion_body(vllm_sampling_fields(params, has_text=False) | {"prompt": asked.prompts})
    return DialectRequest(body=body, whole=lambda context: TrlBuilder(context, has_logprobs=body.logprobs is not None))


def _refusal(failure: Failure) -> TrlRefusal:
    return TrlRefusal(detail=failure.answer.error.message)


TRL = Dialect(name="trl", read=read, refusal=_refusal)
