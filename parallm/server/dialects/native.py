"""ParaLLM's own `/generate`: the fields of `/v1/completions`, answered in columns, one place for each completion."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from parallm.errors import InvalidRequest
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body
from parallm.server.failures import Failure
from parallm.server.generation import ResponseContext, version_of, weight_versions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import CompletionBody, ErrorAnswer, Usage, WeightVersions, Wire
from parallm.types import Completion


class NativeAnswer(Wire):
    """Lists of one length, in the order of the prompts, all completions of one after the other."""

    request_id: str
    step_id: int | str | None
    model: str
    text: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    logprobs_mode: Literal["temperature"]
    finish_reasons: list[str]
    policy_versions: list[int | None]
    weight_versions: list[list[WeightVersions]]
    prompt_index: list[int]
    prompt_token_ids: list[list[int]]
    """One for each prompt."""
    usage: Usage


class NativeAnswers:
    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> NativeAnswer:
        made = [one for group in completions for one in group]
        return NativeAnswer(
            request_id=self._body.request_id or self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            text=[one.text for one in made],
            token_ids=[list(one.tokens) for one in made],
            logprobs=[[finite(logprob) for logprob in one.logprobs] for one in made],
            logprobs_mode="temperature",
            finish_reasons=[one.finish_reason for one in made],
            policy_versions=[version_of(one) for one in made],
            weight_versions=[weight_versions(one) for one in made],
            prompt_index=[prompt for prompt, group in enumerate(completions) for _ in group],
            prompt_token_ids=[list(request.prompt_tokens) for request in self.context.requests],
            usage=self.context.whole_usage(completions),
        )


def read(value: Mapping[str, Any]) -> DialectRequest:
    body = completion_body(value)
    if body.stream:
        raise InvalidRequest("this body gets no stream here; send it to /v1/completions", "stream")
    return DialectRequest(body=body, whole=lambda context: NativeAnswers(context, body))


def refusal(failure: Failure) -> ErrorAnswer:
    return failure.answer


NATIVE = Dialect(name="native", read=read, refusal=refusal)
