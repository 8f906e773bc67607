"""The engine with a hand on it: all traffic of HTTP can be paused, cancelled by id and counted here."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from parallm.errors import EngineFull, InvalidRequest
from parallm.server.interfaces import EngineClient, EngineLoad
from parallm.server.operation.request_context import current_request
from parallm.server.streaming import close
from parallm.types import Completion, GenerationRequest, TokenEvent

MAX_HELD = 4096
"""Requests that may wait for the end of a pause."""

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that run: they end with what they have, go on to their ends, or freeze as they are."""


class EngineGateway:
    """Passes requests on to `engine` one to one; `count` is told of all that end well.

    While it is paused new requests wait here. Used on the asyncio thread only.
    """

    def __init__(
        self, engine: EngineClient, count: Callable[[GenerationRequest, list[Completion]], None] = lambda *_: None
    ) -> None:
        self._engine = engine
        self._count = count
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._running: dict[str, str | None] = {}  # request id -> name of its key
        self._waiting: dict[str, _Waiting] = {}

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    def stats(self) -> EngineLoad:
        return self._engine.stats()

    async def ping(self) -> None:
        await self._engine.ping()

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    @property
    def num_held(self) -> int:
        """Requests that wait for `resume` and that the engine does not know yet."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Requests of HTTP that the engine has."""
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All `n` completions. Cancelling the caller aborts the request."""
        if not await self._let_in(request):
            return [_aborted(request, index) for index in range(request.n)]
        with self._passing(request):
            completions = await self._engine.generate(request)
        self._count(request, completions)
        return completions

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Events of all `n` completions, interleaved. Closing it aborts the request."""
        if not await self._let_in(request):
            for index in range(request.n):
                yield _ended(_aborted(request, index))
            return
        completions: list[Completion] = []
        with self._passing(request):
            events: AsyncIterator[TokenEvent] = self._engine.stream(request)
            try:
                async for event in events:
                    if event.completion is not None:
                        completions.append(event.completion)
                    yield event
            finally:
                await close(events)
        self._count(request, completions)

    async def pause(self, mode: PauseMode) -> None:
        """Let nothing new in; returns when what `mode` says of running requests is done, or at `resume`."""
        self._open.clear()
        if mode == "keep":
            await self._engine.hold()
            return
        if mode == "abort":
            await self._engine.cancel(tuple(self._running))
        await self._engine.release()  # frozen ones could not come to their ends
        await _first_of(self._empty, self._open)

    async def resume(self) -> None:
        await self._engine.release()
        self._open.set()
        for waiting in self._waiting.values():
            waiting.end(is_let_in=True)

    async def cancel(self, request_id: str, *, api_key: str | None = None) -> int:
        """End the requests of that id, which answer with their tokens so far. Returns their number.

        `api_key` is the name of a key: end only the requests that were sent with it.
        """
        waiting = [request for name, request in self._waiting.items() if names_request(name, request_id)]
        waiting = [request for request in waiting if api_key in (None, request.api_key)]
        for request in waiting:
            request.end(is_let_in=False)
        running = [name for name, key in self._running.items() if api_key in (None, key)]
        running = [name for name in running if names_request(name, request_id)]
        await self._engine.cancel(running)
        return len(waiting) + len(running)

    async def cancel_all(self) -> int:
        names = {answer_id(name) for name in (*self._waiting, *self._running)}
        return sum([await self.cancel(name) for name in names])

    async def reset_caches(self) -> None:
        await self._engine.reset_caches()

    async def _let_in(self, request: GenerationRequest) -> bool:
        """Wait while paused. False: it was cancelled here."""
        name = request.request_id
        if name in self._running or name in self._waiting:
            raise InvalidRequest(f"request id {answer_id(name)!r} is in use", "request_id")
        if self._open.is_set():
            return True
        if len(self._waiting) >= MAX_HELD:
            raise EngineFull(f"the server is paused and {MAX_HELD} requests wait already; try again after /resume")
        waiting = self._waiting[name] = _Waiting(asyncio.get_running_loop().create_future(), _key_of_request())
        try:
            return await waiting.is_let_in
        finally:
            del self._waiting[name]

    @contextmanager
    def _passing(self, request: GenerationRequest) -> Iterator[None]:
        self._running[request.request_id] = _key_of_request()
        self._empty.clear()
        try:
            yield
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._empty.set()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for `resume`."""

    is_let_in: asyncio.Future[bool]
    """False: it was cancelled."""
    api_key: str | None

    def end(self, *, is_let_in: bool) -> None:
        if not self.is_let_in.done():
            self.is_let_in.set_result(is_let_in)


def _key_of_request() -> str | None:
    context = current_request.get()
    return None if context is None else context.api_key


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def answer_id(request_id: str) -> str:
    """The id of the whole answer, of which `request_id` is one prompt."""
    return request_id.partition("#")[0]


def names_request(request_id: str, name: str) -> bool:
    """Whether a client means this request by `name`: the id of its answer, or the `request_id` that it has sent."""
    answer = answer_id(request_id)
    return name in (answer, answer.removeprefix("cmpl-"), answer.removeprefix("chatcmpl-"))


def _aborted(request: GenerationRequest, index: int) -> Completion:
    return Completion(
        request_id=request.request_id,
        index=index,
        tokens=(),
        logprobs=(),
        top_logprobs=(),
        text="",
        finish_reason="abort",
        weight_versions=(),
    )


def _ended(completion: Completion) -> TokenEvent:
    return TokenEvent(
        request_id=completion.request_id,
        index=completion.index,
        tokens=(),
        logprobs=(),
        top_logprobs=(),
        text="",
        completion=completion,
    )
