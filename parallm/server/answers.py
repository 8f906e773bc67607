"""Domain answers to wire answers for both endpoints, whole and in chunks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from pydantic import BaseModel

from parallm.server.answer_schemas import PromptTokensDetails, Usage, WeightVersions
from parallm.server.control.recording import Recorder
from parallm.server.service import Tokenizer, TokenTexts
from parallm.types import Completion, GenerationRequest, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of one answer share, and what the client asked to see."""

    answer_id: str
    created: int
    requests: Sequence[GenerationRequest]
    """One for each prompt."""
    tokenizer: Tokenizer
    token_texts: TokenTexts
    """What tokens are called in log-probs."""
    logprobs: bool
    token_ids: bool
    usage_chunk: bool
    recorder: Recorder | None = None
    """Where the client wants the policy to learn from this answer."""
    usage_in_chunks: bool = False
    """Each chunk tells the tokens so far, of all choices together."""
    num_running: int = 0
    """Completions that decoded when the request came."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Echo` that every chunk carries."""

    def choice_index(self, prompt: int, index: int) -> int:
        """Choices are numbered through: all of the first prompt, then all of the second."""
        return prompt * self.requests[prompt].n + index

    def usage(self, num_completion_tokens: int) -> Usage:
        num_prompt_tokens = sum(len(request.prompt_tokens) for request in self.requests)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )

    def whole_usage(self, completions: Iterable[Iterable[Completion]]) -> Usage:
        """Of an answer that is complete; `completions` by prompt."""
        groups = [list(group) for group in completions]
        used = self.usage(sum(len(one.tokens) for group in groups for one in group))
        # a prompt counts once, however many completions go on from it
        cached = sum(max((one.num_cached_prompt_tokens for one in group), default=0) for group in groups)
        return used.model_copy(update={"prompt_tokens_details": PromptTokensDetails(cached_tokens=cached)})


class WholeAnswers(Protocol):
    """One endpoint's way to answer all at once. An object serves one request."""

    @property
    def head(self) -> Head: ...

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> BaseModel:
        """`completions` by prompt."""
        ...


class Answers(WholeAnswers, Protocol):
    """The same in chunks, too."""

    def opening(self, model: str) -> Sequence[BaseModel]:
        """Chunks before the first text."""
        ...

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> BaseModel | None:
        """None if there is nothing to tell yet, such as text held back for a stop string."""
        ...

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> BaseModel: ...

    def usage_chunk(self, model: str, usage: Usage) -> BaseModel: ...


class Provenance(TypedDict):
    """Fields of a choice that say how it ended and which weights made it."""

    finish_reason: str | None
    policy_version: int | None
    weight_versions: list[WeightVersions] | None


UNFINISHED = Provenance(finish_reason=None, policy_version=None, weight_versions=None)


def version_of(completion: Completion) -> int | None:
    """The version of the last token."""
    return completion.weight_versions[-1].version if completion.weight_versions else None


def provenance(completion: Completion) -> Provenance:
    return Provenance(
        finish_reason=completion.finish_reason,
        policy_version=version_of(completion),
        weight_versions=weight_versions(completion),
    )


def weight_versions(completion: Completion) -> list[WeightVersions]:
    return [
        WeightVersions(version=str(span.version), start=span.start, end=span.end) for span in completion.weight_versions
    ]
