"""The engine as the routes use it: limits, pauses, cancels, paces, measures and traces all requests of HTTP.

Routes call `generate` and `stream`, those of control call `pause`, `resume` and `cancel`. Used on the event loop only.
A request passes one to one to the engine; all listeners get each request that has ended well.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from parallm.errors import ContextTooLong, EngineFull, InvalidRequest
from parallm.server.catalog import answered_by
from parallm.server.interfaces import EngineClient
from parallm.server.operation.request_context import current_request
from parallm.server.operation.request_metrics import RequestMetrics
from parallm.server.operation.tracing import Traces
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard, Completion, GenerationRequest, TokenEvent

MAX_HELD = 4096
"""Requests that may wait for the end of a pause."""
MANY_STREAMS = 16
"""More streams than these are coalesced."""

NOTHING: Mapping[str, Any] = {"tokens": (), "logprobs": (), "top_logprobs": (), "text": ""}
"""Output of a request that never ran."""

PauseMode = Literal["abort", "wait", "keep"]
"""Modes of a pause: running requests end with their tokens so far, go on to their ends, or freeze."""
CompletionListener: TypeAlias = Callable[[GenerationRequest, Sequence[Completion]], None]


class EngineGateway:
    def __init__(
        self,
        engine: EngineClient,
        *,
        settings: ServerSettings,
        metrics: RequestMetrics,
        catalog: Callable[[], tuple[AdapterCard, ...]] = tuple,
        traces: Traces | None = None,
        listeners: Sequence[CompletionListener] = (),
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._catalog = catalog
        self._traces = traces
        self._listeners = listeners
        self._coalescer = StreamCoalescer(engine, settings.coalesce_ms)
        self.is_paused = False
        self._settled = asyncio.Event()
        """Set when no request runs, and at the end of a pause."""
        self._running: dict[str, str | None] = {}  # request id -> name of its key
        self._held: dict[str, _HeldRequest] = {}

    @property
    def num_held(self) -> int:
        """Requests that wait for `resume`; the engine does not know them yet."""
        return len(self._held)

    @property
    def num_in_flight(self) -> int:
        """Requests of HTTP that the engine has."""
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return all `n` completions. Cancelling the caller aborts the request.

        Raises as the engine, and ContextTooLong for more prompt tokens than `server.max_prompt_tokens`.
        """
        with self._timed(request) as timer:
            if await self._admit(request):
                with self._in_flight(request):
                    completions = await self._engine.generate(request)
                self._notify(request, completions)
            else:
                completions = [_aborted(request, index) for index in range(request.n)]
            for completion in completions:
                timer.count_tokens(len(completion.tokens))
                timer.end_completion(completion)
            return completions

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield events of all `n` completions, interleaved. Closing it aborts the request. Raises as `generate`."""
        with self._timed(request) as timer, self._coalescer.stream():
            if not await self._admit(request):
                for index in range(request.n):
                    event = _ended(_aborted(request, index))
                    timer.count_event(event)
                    yield event
                return
            with self._in_flight(request):
                async with aclosing(self._engine.stream(request)) as events:
                    async for event in events:
                        timer.count_event(event)
                        yield event
            self._notify(request, timer.completions)

    async def completions(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
        """Yield each completion of a trainer's request as soon as it ends, or all as aborted if it is cancelled before.

        Closing it aborts the request. Raises as `generate`. Listeners do not hear of it: no client asked.
        """
        with self._timed(request) as timer:
            if not await self._admit(request):
                for index in range(request.n):
                    yield _aborted(request, index)
                return
            with self._in_flight(request):
                async with aclosing(self._engine.completions([request])) as ended:
                    async for _, completion in ended:
                        timer.count_tokens(len(completion.tokens))
                        timer.end_completion(completion)
                        yield completion

    async def pause(self, mode: PauseMode) -> None:
        """Admit no new requests; return once running ones have done what `mode` says, or at `resume`."""
        self.is_paused = True
        if mode == "keep":
            await self._engine.pause()
            return
        if mode == "abort":
            await self._engine.cancel(tuple(self._running))
        await self._engine.resume()  # frozen requests could not come to their ends
        if self._running and self.is_paused:
            self._settled.clear()
            await self._settled.wait()

    async def resume(self) -> None:
        await self._engine.resume()
        self.is_paused = False
        self._settled.set()
        for held in self._held.values():
            held.end(is_admitted=True)

    async def cancel(self, request_id: str, *, api_key: str | None = None) -> int:
        """End the requests of that id, which answer with their tokens so far. Returns their number.

        `api_key` is the name of a key: end only the requests that were sent with it.
        """

        def is_meant(name: str, key: str | None) -> bool:
            return names_request(name, request_id) and api_key in (None, key)

        held = [request for name, request in self._held.items() if is_meant(name, request.api_key)]
        for request in held:
            request.end(is_admitted=False)
        running = [name for name, key in self._running.items() if is_meant(name, key)]
        await self._engine.cancel(running)
        return len(held) + len(running)

    async def cancel_all(self) -> int:
        names = {answer_id(name) for name in (*self._held, *self._running)}
        return sum([await self.cancel(name) for name in names])

    async def _admit(self, request: GenerationRequest) -> bool:
        """Wait for the end of a pause. False: the request was cancelled meanwhile."""
        name = request.request_id
        if name in self._running or name in self._held:
            raise InvalidRequest(f"request id {answer_id(name)!r} is in use", "request_id")
        while self.is_paused:  # as it may be again when this wakes
            if len(self._held) >= MAX_HELD:
                raise EngineFull(f"the server is paused and {MAX_HELD} requests wait already; try again after /resume")
            held = self._held[name] = _HeldRequest(asyncio.get_running_loop().create_future(), _api_key())
            try:
                if not await held.is_admitted:
                    return False
            finally:
                del self._held[name]
        return True

    @contextmanager
    def _in_flight(self, request: GenerationRequest) -> Iterator[None]:
        self._running[request.request_id] = _api_key()
        try:
            yield
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._settled.set()

    @contextmanager
    def _timed(self, request: GenerationRequest) -> "Iterator[RequestTimer]":
        """Check the prompt's length, then measure and trace the request however it ends. Raises ContextTooLong."""
        limit, num_tokens = self._settings.max_prompt_tokens, len(request.prompt_tokens)
        if limit is not None and num_tokens > limit:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens, the limit is {limit}; shorten it or raise "
                "server.max_prompt_tokens",
                "prompt",
            )
        timer = RequestTimer(request, self._metrics)
        try:
            yield timer
        finally:
            error = sys.exception()
            timer.end()
            if self._traces is not None:
                timer.trace(self._traces, self._catalog(), error)

    def _notify(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        for listener in self._listeners:
            listener(request, completions)


class StreamCoalescer:
    """Makes many open streams send less often: all at the same moment, with more text each time."""

    def __init__(self, engine: EngineClient, coalesce_ms: float) -> None:
        self._engine = engine
        self._seconds = coalesce_ms / 1000
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        were_many = self._num_streams > MANY_STREAMS
        self._num_streams += change
        are_many = self._num_streams > MANY_STREAMS
        if self._seconds and were_many != are_many:
            self._engine.coalesce(self._seconds if are_many else 0.0)


class RequestTimer:
    """Measures one request: times to its tokens, their number, how its completions end."""

    def __init__(self, request: GenerationRequest, metrics: RequestMetrics) -> None:
        self._request = request
        self._metrics = metrics
        self._began = time.perf_counter()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.num_unfinished = request.n
        self.completions: list[Completion] = []
        self._num_tokens = 0
        self._context = current_request.get()
        metrics.n.observe(request.n)
        metrics.max_tokens.observe(request.sampling.max_tokens)
        metrics.prompt_lengths.observe(len(request.prompt_tokens))
        if self._context is not None:
            self._context.model = request.model
            self._context.num_prompt_tokens += len(request.prompt_tokens)

    def count_event(self, event: TokenEvent) -> None:
        """Count an event of a stream, and the times between its tokens."""
        index = event.index
        if event.tokens:
            now = time.perf_counter()
            last = self._last.get(index)
            if last is not None:
                self._metrics.inter_token.observe((now - last) / len(event.tokens))
            else:
                if not self._first:
                    self._metrics.first_token.observe(now - self._began)
                self._first[index] = now
            self._last[index] = now
            self.count_tokens(len(event.tokens))
        if event.completion is not None:
            num_tokens = len(event.completion.tokens)
            if num_tokens > 1 and index in self._first:
                self._metrics.per_token.observe((self._last[index] - self._first[index]) / (num_tokens - 1))
            self.end_completion(event.completion)

    def count_tokens(self, number: int) -> None:
        self._num_tokens += number
        self._metrics.generation_tokens.inc(number)
        if self._context is not None:
            self._context.num_completion_tokens += number

    def end_completion(self, completion: Completion) -> None:
        self.num_unfinished -= 1
        self.completions.append(completion)
        self._metrics.finished[completion.finish_reason].inc()
        self._metrics.lengths.observe(len(completion.tokens))

    def end(self) -> None:
        """Count unfinished completions as aborted: by the client, a limit or an error, as the HTTP status says."""
        self._metrics.request.observe(time.perf_counter() - self._began)
        if self.num_unfinished < self._request.n or self._first:
            self._metrics.prompt_tokens.inc(len(self._request.prompt_tokens))
        if self.num_unfinished:
            self._metrics.finished["abort"].inc(self.num_unfinished)

    def trace(self, traces: Traces, cards: Sequence[AdapterCard], error: BaseException | None) -> None:
        """Record the whole request as a span."""
        completions = self.completions
        traces.record(
            self._request,
            self._context,
            began=self._began,
            first_token=min(self._first.values(), default=None),
            completions=completions,
            num_tokens=self._num_tokens,
            model=answered_by(self._request.model, completions[0], cards) if completions else None,
            error=_name(error),
        )


@dataclass(frozen=True, slots=True)
class _HeldRequest:
    """A request that waits for `resume`."""

    is_admitted: asyncio.Future[bool]
    """False: it was cancelled."""
    api_key: str | None

    def end(self, *, is_admitted: bool) -> None:
        if not self.is_admitted.done():
            self.is_admitted.set_result(is_admitted)


def answer_id(request_id: str) -> str:
    """Return the id of the whole answer, of which `request_id` is one prompt."""
    return request_id.partition("#")[0]


def names_request(request_id: str, name: str) -> bool:
    """Return whether `name` means this request: it is the id of its answer, or the `request_id` that a client sent."""
    answer = answer_id(request_id)
    return name in (answer, answer.removeprefix("cmpl-"), answer.removeprefix("chatcmpl-"))


def _api_key() -> str | None:
    context = current_request.get()
    return None if context is None else context.api_key


def _name(error: BaseException | None) -> str | None:
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return None if error is None else type(error).__name__


def _aborted(request: GenerationRequest, index: int) -> Completion:
    return Completion(request_id=request.request_id, index=index, finish_reason="abort", weight_versions=(), **NOTHING)


def _ended(completion: Completion) -> TokenEvent:
    return TokenEvent(request_id=completion.request_id, index=completion.index, completion=completion, **NOTHING)
