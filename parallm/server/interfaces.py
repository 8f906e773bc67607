"""Interfaces of the engine that the server uses."""

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from parallm.types import Completion, GenerationRequest, TokenEvent, TrafficClass


class EngineLoad(Protocol):
    """Completions that run and requests that wait."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def tokens_total(self) -> Mapping[TrafficClass, int]: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_bytes_limit(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prompt_tokens_total(self) -> int: ...
    @property
    def cached_prompt_tokens_total(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def draft_tokens_total(self) -> int: ...
    @property
    def accepted_draft_tokens_total(self) -> int: ...


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


class EngineClient(Engine, Protocol):
    """Interface that `EngineGateway` uses beyond that."""

    async def cancel(self, request_ids: Collection[str]) -> int:
        """End requests: they answer with what they have, and `abort` as the reason. Returns how many ran."""
        ...

    async def hold(self) -> None:
        """Freeze serving traffic where it is, until `release`."""
        ...

    async def release(self) -> None: ...

    async def reset_caches(self) -> None:
        """Forget what only saves work."""
        ...
