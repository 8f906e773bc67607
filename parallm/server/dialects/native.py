"""ParaLLM's own `/generate`: the fields of `/v1/completions`, answered in columns with one item for each completion."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from parallm.errors import InvalidRequest
from parallm.server.catalog import version_of
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body, openai_refusal
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import CompletionBody, Usage, WeightVersions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import Wire
from parallm.types import Completion


class NativeAnswer(Wire):
    """Lists of one length: the completions of the first prompt, then those of the second, and so on."""

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


class NativeBuilder:
    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> NativeAnswer:
        flat = [completion for group in completions for completion in group]
        return NativeAnswer(
            request_id=self._body.request_id or self.context.answer_id,
            step_id=self._body.step_id,
            model=model,
            text=[completion.text for completion in flat],
            token_ids=[list(completion.tokens) for completion in flat],
            logprobs=[[finite(logprob) for logprob in completion.logprobs] for completion in flat],
            logprobs_mode="temperature",
            finish_reasons=[completion.finish_reason for completion in flat],
            policy_versions=[version_of(completion) for completion in flat],
            weight_versions=[weight_versions(completion) for completion in flat],
            prompt_index=[prompt for prompt, group in enumerate(completions) for _ in group],
            prompt_token_ids=[list(request.prompt_tokens) for request in self.context.requests],
            usage=self.context.whole_usage(completions),
        )


def read(value: Mapping[str, Any]) -> DialectRequest:
    body = completion_body(value)
    if body.stream:
        raise InvalidRequest("this body gets no stream here; send it to /v1/completions", "stream")
    return DialectRequest(body=body, whole=lambda context: NativeBuilder(context, body))


NATIVE = Dialect(name="native", read=read, refusal=openai_refusal)
