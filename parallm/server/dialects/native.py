"""ParaLLM's own `/generate`: the fields of `/v1/completions`, answered in columns with one item for each completion.

For trainers that name the version they believe to be served, `policy_version`, the answer is an object, or for several
completions a list of them in the order of the prompts.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from parallm.errors import InvalidRequest
from parallm.server.catalog import version_of
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import CompletionBody, Usage, WeightVersions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import MAX_INT, Wire, checked, is_tokens
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
            request_id=self.context.answer_id,
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


def read_native(value: Mapping[str, Any]) -> DialectRequest:
    body = completion_body(value)
    return DialectRequest(body=body, whole=lambda context: NativeBuilder(context, body))


NATIVE = Dialect(name="native", read=read_native)


class VersionedBody(Wire):
    """Fields of this body alone; all others are those of `/v1/completions`."""

    policy_version: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Version that the trainer believes to be served. The answer repeats it beside the version that sampled."""


class VersionedMetadata(Wire):
    batch_size: int
    """Completions that decode when the request arrives, its own included."""
    latency_ms: float
    current_policy_version: int | None
    """Version that sampled; null where nothing was sampled."""


class VersionedAnswer(Wire):
    request_id: str
    policy_version: int | None
    """Version of the request; without one, the version that sampled."""
    step_id: int | str | None
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    logprobs: list[float]
    """Log-probs of the sampled tokens, after temperature."""
    finish_reason: str
    weight_versions: list[WeightVersions]
    model: str
    metadata: VersionedMetadata


class VersionedAnswers(RootModel[list[VersionedAnswer]]):
    """Answer to several prompts, or to `n` above 1."""


class VersionedBuilder:
    def __init__(self, context: ResponseContext, *, body: CompletionBody, believed: int | None, is_batch: bool) -> None:
        self.context = context
        self._body = body
        self._believed = believed
        self._is_batch = is_batch
        self._began = time.perf_counter()

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> VersionedAnswer | VersionedAnswers:
        answers = [
            self._answer(model, prompt, completion) for prompt, group in enumerate(completions) for completion in group
        ]
        return VersionedAnswers(answers) if self._is_batch or len(answers) > 1 else answers[0]

    def _answer(self, model: str, prompt: int, completion: Completion) -> VersionedAnswer:
        version = version_of(completion)
        return VersionedAnswer(
            request_id=self.context.answer_id,
            policy_version=version if self._believed is None else self._believed,
            step_id=self._body.step_id,
            prompt_ids=list(self.context.requests[prompt].prompt_tokens),
            completion_ids=list(completion.tokens),
            text=completion.text,
            logprobs=[finite(logprob) for logprob in completion.logprobs],
            finish_reason=completion.finish_reason,
            weight_versions=weight_versions(completion),
            model=model,
            metadata=VersionedMetadata(
                batch_size=self.context.num_running + sum(request.n for request in self.context.requests),
                latency_ms=1000 * (time.perf_counter() - self._began),
                current_policy_version=version,
            ),
        )


def read_versioned(value: Mapping[str, Any]) -> DialectRequest:
    own = checked({"policy_version": value.get("policy_version")}, VersionedBody)
    body = completion_body({name: item for name, item in value.items() if name != "policy_version"})
    if (body.logprobs or 0) > 1:
        raise InvalidRequest(
            f"logprobs is {body.logprobs}; 1 gives those of the sampled tokens, and /v1/completions gives more",
            "logprobs",
        )
    prompt = value["prompt"]
    is_batch = isinstance(prompt, list) and not is_tokens(prompt)
    body = body.model_copy(update={"logprobs": None})  # the engine always returns those of sampled tokens
    return DialectRequest(
        body=body, whole=partial(VersionedBuilder, body=body, believed=own.policy_version, is_batch=is_batch)
    )


VERSIONED = Dialect(name="versioned", read=read_versioned)
