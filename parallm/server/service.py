"""What the routes need from the rest of the program, as narrow faces: no import of MLX, none of the trainer."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parallm.reports import TrainingStatus
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard, Completion, GenerationRequest, Message, TokenEvent, TrafficClass


class EngineLoad(Protocol):
    """Completions that run and requests that wait."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def tokens_total(self) -> Mapping[TrafficClass, int]: ...


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

    async def ping(self) -> None:
        """Returns when the device thread has come by. Raises EngineStopped."""
        ...


class Tokenizer(Protocol):
    """The face of `model.chat.ChatTokenizer` that the server uses."""

    def encode(self, text: str) -> tuple[int, ...]: ...
    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]: ...
    def token_text(self, token: int) -> str: ...


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
    device_seconds: Callable[[], Mapping[str, float]]
    """By kind of work, since the start."""
