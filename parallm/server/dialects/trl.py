"""TRL's `/generate/`, as its VLLMClient asks for it: `prompts` are texts or lists of token ids."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from parallm.errors import InvalidRequest
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body, sampling_fields
from parallm.server.failures import Failure
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import WeightVersions, Wire, checked, read_prompts
from parallm.types import Completion

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "images": ([],),
    "truncate_prompt_tokens": (),
}
RENAMED = {"guided_decoding_regex": "guided_regex", "structured_outputs_regex": "guided_regex"}


class TrlBody(Wire):
    """What is TRL's own; all other fields have the names of `/v1/completions`."""

    prompts: Annotated[list[str | list[int]], PlainValidator(read_prompts)]
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's SamplingParams, which go before those of the body."""


class TrlAnswer(Wire):
    prompt_ids: list[list[int]]
    """One for each prompt; all else is one for each completion."""
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    """Of each token the sampled one and the most likely ones, likeliest first."""
    logprob_token_ids: list[list[list[int]]] | None
    finish_reasons: list[str]
    weight_versions: list[list[WeightVersions]]


class TrlRefusal(Wire):
    detail: str


class TrlAnswers:
    def __init__(self, context: ResponseContext, *, has_logprobs: bool) -> None:
        self.context = context
        self._has_logprobs = has_logprobs

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> TrlAnswer:
        made = [one for group in completions for one in group]
        ranked = [_ranked(one) for one in made]
        logprobs = [[[logprob for _, logprob in place] for place in one] for one in ranked]
        token_ids = [[[token for token, _ in place] for place in one] for one in ranked]
        return TrlAnswer(
            prompt_ids=[list(request.prompt_tokens) for request in self.context.requests],
            completion_ids=[list(one.tokens) for one in made],
            logprobs=logprobs if self._has_logprobs else None,
            logprob_token_ids=token_ids if self._has_logprobs else None,
            finish_reasons=[one.finish_reason for one in made],
            weight_versions=[weight_versions(one) for one in made],
        )


def _ranked(completion: Completion) -> list[list[tuple[int, float]]]:
    tops = completion.top_logprobs or ((),) * len(completion.tokens)
    places = [
        {token: finite(logprob)} | {one.token: finite(one.logprob) for one in top}
        for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]
    return [sorted(place.items(), key=lambda pair: -pair[1]) for place in places]


def read(value: Mapping[str, Any]) -> DialectRequest:
    own = {name: value[name] for name in ("prompts", "generation_kwargs", *NEUTRAL) if name in value}
    asked = checked(own, TrlBody, NEUTRAL)
    # without the field TRL wants the log-probs of the sampled tokens, with null none
    others = {RENAMED.get(name, name): item for name, item in value.items() if name not in own}
    rest = {"logprobs": 0} | others | asked.generation_kwargs
    body = completion_body(sampling_fields(rest, has_text=False) | {"prompt": asked.prompts})
    if body.stream:
        raise InvalidRequest("this body gets no stream; send its prompts to /v1/completions", "stream")
    return DialectRequest(body=body, whole=lambda context: TrlAnswers(context, has_logprobs=body.logprobs is not None))


def refusal(failure: Failure) -> TrlRefusal:
    return TrlRefusal(detail=failure.answer.error.message)


TRL = Dialect(name="trl", read=read, refusal=refusal)
