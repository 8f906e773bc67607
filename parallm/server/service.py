"""What the routes need from the rest of the program, as narrow faces: no import of MLX, none of the trainer."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parallm.conversation import ChatPrompt, GrammarSource, PromptEnd, Section, ToolCall
from parallm.reports import TrainingStatus
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard, Completion, GenerationRequest, Grammar, TokenEvent


class EngineLoad(Protocol):
    """Completions that run and requests that wait."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class Engine(Protocol):
    """The face of `engine.async_engine.AsyncEngine` that the server uses."""

    @property
    def max_context(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All `n` completions. Cancelling the caller aborts the request."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of all `n` completions, interleaved. Closing it aborts the request."""
        ...

    def stats(self) -> EngineLoad: ...


class OutputReader(Protocol):
    """Text of one answer in sections, without the marks between them."""

    def read(self, text: str) -> list[tuple[Section, str]]: ...
    def finish(self) -> list[tuple[Section, str]]: ...


class OutputFormat(Protocol):
    """The face of `model.chat_output.OutputFormat` that the server uses."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that begins or ends a section."""
        ...

    @property
    def tool_marks(self) -> tuple[str, str] | None:
        """None for a model whose notation of tool calls is unknown."""
        ...

    def reader(self, *, begins_in_reasoning: bool, has_tools: bool) -> OutputReader: ...
    def parse_calls(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[ToolCall]: ...


class TokenTexts(Protocol):
    def token_text(self, token: int) -> str:
        """Text of one token, special tokens shown."""
        ...


class Tokenizer(TokenTexts, Protocol):
    """The face of `model.chat.ChatTokenizer` that the server uses."""

    @property
    def output(self) -> OutputFormat: ...
    @property
    def template_variables(self) -> frozenset[str]:
        """What a client may set in the chat template."""
        ...

    def encode(self, text: str) -> tuple[int, ...]: ...
    def encode_prompt(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> ChatPrompt: ...
    def compile_grammar(self, source: GrammarSource, *, reasoning: bool | None = None) -> Grammar:
        """Takes up to a second. `reasoning`: the text begins inside of some, or may begin with some; None: it has none.

        Raises InvalidRequest.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that a route may use."""

    engine: Engine
    tokenizer: Tokenizer
    catalog: Callable[[], tuple[AdapterCard, ...]]
    status: Callable[[], TrainingStatus]
    settings: ServerSettings
    base_name: str
    policies: tuple[str, ...]
    """Names that are the base until their first version is published."""
    started: int
    """Unix seconds."""
