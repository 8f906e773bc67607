"""The engine as the routes use it: the same face, bounded and paced by the settings and counted for `/metrics`."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from parallm.errors import ContextTooLong
from parallm.server.catalog import resolved_to
from parallm.server.generation import version_of
from parallm.server.interfaces import Engine, EngineLoad
from parallm.server.operation.request_context import current_request
from parallm.server.operation.request_metrics import RequestMetrics
from parallm.server.operation.stream_coalescing import StreamCoalescer
from parallm.server.operation.tracing import FinishedRequest, Traces
from parallm.server.settings import ServerSettings
from parallm.server.streaming import close
from parallm.types import AdapterCard, Completion, GenerationRequest, TokenEvent


class MeteredEngine:
    """Costs two counters for each event of a stream, and no second look at its tokens."""

    def __init__(
        self,
        engine: Engine,
        request_metrics: RequestMetrics,
        settings: ServerSettings,
        traces: Traces | None,
        catalog: Callable[[], tuple[AdapterCard, ...]] = tuple,
    ) -> None:
        self._engine = engine
        self._request_metrics = request_metrics
        self._settings = settings
        self._traces = traces
        self._catalog = catalog
        self._coalescer = StreamCoalescer(settings.coalesce_ms)

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

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Raises as the engine, and ContextTooLong for more prompt tokens than `server.max_prompt_tokens`."""
        self._check(request)
        watch = _Watch(request, self._request_metrics)
        try:
            completions = await self._engine.generate(request)
            for completion in completions:
                watch.tokens(len(completion.tokens))
                watch.finished(completion)
            return completions
        finally:
            self._end(watch)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Raises as `generate`."""
        self._check(request)
        watch = _Watch(request, self._request_metrics)
        events: AsyncIterator[TokenEvent] = self._engine.stream(request)
        num_since_rest = 0
        try:
            with self._coalescer.stream():
                async for event in events:
                    watch.event(event)
                    yield event
                    num_since_rest += 1
                    if num_since_rest >= watch.num_unfinished > 0:  # all completions have told what they had
                        num_since_rest = 0
                        await self._coalescer.rest()
        finally:
            self._end(watch)
            await close(events)

    def _end(self, watch: "_Watch") -> None:
        error = sys.exception()
        watch.end()
        if self._traces is not None:
            self._traces.record(watch.told(self._catalog(), _name(error)))

    def _check(self, request: GenerationRequest) -> None:
        limit, found = self._settings.max_prompt_tokens, len(request.prompt_tokens)
        if limit is not None and found > limit:
            raise ContextTooLong(
                f"the prompt has {found} tokens, the limit is {limit}; shorten it or raise server.max_prompt_tokens",
                "prompt",
            )


class _Watch:
    """The clock of one request."""

    def __init__(self, request: GenerationRequest, request_metrics: RequestMetrics) -> None:
        self._request = request
        self._request_metrics = request_metrics
        self._began = time.perf_counter()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.num_unfinished = request.n
        self._completions: list[Completion] = []
        self._num_tokens = 0
        self._context = current_request.get()
        request_metrics.n.observe(request.n)
        request_metrics.max_tokens.observe(request.sampling.max_tokens)
        request_metrics.prompt_lengths.observe(len(request.prompt_tokens))
        if self._context is not None:
            self._context.model = request.model
            self._context.num_prompt_tokens += len(request.prompt_tokens)

    def event(self, event: TokenEvent) -> None:
        """Of a stream: also the times between tokens."""
        index = event.index
        if event.tokens:
            now = time.perf_counter()
            last = self._last.get(index)
            if last is not None:
                self._request_metrics.inter_token.observe((now - last) / len(event.tokens))
            else:
                if not self._first:
                    self._request_metrics.first_token.observe(now - self._began)
                self._first[index] = now
            self._last[index] = now
            self.tokens(len(event.tokens))
        if event.completion is not None:
            num_tokens = len(event.completion.tokens)
            if num_tokens > 1 and index in self._first:
                self._request_metrics.per_token.observe((self._last[index] - self._first[index]) / (num_tokens - 1))
            self.finished(event.completion)

    def tokens(self, count: int) -> None:
        self._num_tokens += count
        self._request_metrics.generation_tokens.inc(count)
        if self._context is not None:
            self._context.num_completion_tokens += count

    def finished(self, completion: Completion) -> None:
        self.num_unfinished -= 1
        self._completions.append(completion)
        self._request_metrics.finished[completion.finish_reason].inc()
        self._request_metrics.lengths.observe(len(completion.tokens))

    def end(self) -> None:
        """What is unfinished was aborted by the client, by a limit or by an error; its kind is in the HTTP status."""
        self._request_metrics.request.observe(time.perf_counter() - self._began)
        if self.num_unfinished < self._request.n or self._first:
            self._request_metrics.prompt_tokens.inc(len(self._request.prompt_tokens))
        if self.num_unfinished:
            self._request_metrics.finished["abort"].inc(self.num_unfinished)

    def told(self, cards: Sequence[AdapterCard], error: str | None) -> FinishedRequest:
        """The whole request, for its span."""
        made = self._completions
        return FinishedRequest(
            request=self._request,
            context=self._context,
            began=self._began,
            first_token=min(self._first.values(), default=None),
            ended=time.perf_counter(),
            finish_reasons=[one.finish_reason for one in made],
            num_tokens=self._num_tokens,
            num_cached_tokens=max((one.num_cached_prompt_tokens for one in made), default=0),
            model=resolved_to(self._request.model, version_of(made[0]), cards) if made else None,
            error=error,
        )


def _name(error: BaseException | None) -> str | None:
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return None if error is None else type(error).__name__
