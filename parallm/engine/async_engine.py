"""The engine as asyncio code sees it: the only hop between the asyncio thread and the device thread."""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace

from parallm.device.memory import give_back_memory
from parallm.device.thread import DeviceThread
from parallm.engine.engine import Engine
from parallm.errors import ContextTooLong, EngineStopped, InvalidRequest, ParallmError
from parallm.types import Completion, EngineRow, EngineStats, GenerationRequest, SamplingParams, TokenEvent

Delivery = TokenEvent | Exception


class AsyncEngine:
    """Generate and stream. Used on one asyncio loop; the device thread calls `emit` and `report`."""

    def __init__(self, device: DeviceThread, loop: asyncio.AbstractEventLoop) -> None:
        self._device = device
        self._loop = loop
        self._engine: Engine | None = None
        self._names: set[str] = set()  # request ids
        self._count = itertools.count()
        self._channels: dict[str, Channel] = {}  # by the id that the engine knows
        self._interval = 0.0  # seconds
        self._tick: asyncio.TimerHandle | None = None
        self._asked: Future[None] | None = None  # the last call of `hold_events`

    def attach(self, engine: Engine) -> None:
        """Start to serve; before this every request is refused."""
        self._engine = engine
        self._device.attach(engine)

    def detach(self) -> None:
        """Forget the engine, which has no work. On the device thread."""
        self._device.detach(self.attached)
        self._engine = None

    @property
    def is_alive(self) -> bool:
        return self._engine is not None and self._device.is_alive

    @property
    def max_context(self) -> int:
        return self.attached.max_context

    def stats(self) -> EngineStats:
        engine = self.attached
        budget, prefixes = engine.kv_budget, engine.memory.prefixes
        prefill, speculation = engine.prefill, engine.speculation
        return EngineStats(
            num_running=engine.num_running(),
            num_waiting=engine.num_waiting(),
            tokens_total=engine.num_tokens(),
            max_rows=budget.max_rows,
            kv_bytes=budget.used,
            kv_bytes_limit=budget.limit,
            num_preemptions=engine.scheduler.num_preempted,
            prefix_bytes=prefixes.nbytes,
            num_prefix_lookups=prefixes.num_lookups,
            num_prefix_hits=prefixes.num_hits,
            prompt_tokens_total=prefill.num_prompt_tokens,
            cached_prompt_tokens_total=prefill.num_cached_tokens,
            num_drafts=speculation.num_drafts,
            draft_tokens_total=speculation.num_drafted,
            accepted_draft_tokens_total=speculation.num_accepted,
        )

    async def ping(self) -> None:
        """Return when the device thread is between two units of work. Raises EngineStopped."""
        await self._call(lambda engine: None)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All completions of a request, by index. Cancelling the task aborts the request.

        Raises InvalidRequest, ContextTooLong, UnknownModel, EngineFull, EngineStopped.
        """
        return (await self.generate_all([request]))[0]

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """`generate` for several requests, which the engine gets at the same moment, so that they make the same batches
        in every run."""
        groups: list[list[Completion]] = [[] for _ in requests]
        async for index, completion in self.completions(requests):
            groups[index].append(completion)
        return [sorted(group, key=lambda completion: completion.index) for group in groups]

    async def completions(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        """Each completion of several requests as soon as it ends, with the index of its request.

        The engine gets the requests at the same moment; closing the iterator aborts them. Raises as `generate`.
        """
        indices = {request.request_id: index for index, request in enumerate(requests)}
        async with aclosing(self._events(requests, is_streaming=False)) as events:
            async for event in events:
                if event.completion is not None:
                    yield indices[event.request_id], event.completion

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Events of all completions as they come, or as `coalesce` says, joined while the consumer is elsewhere. Raises
        as `generate`; closing the iterator aborts the request."""
        return self._events([request], is_streaming=True)

    def coalesce(self, seconds: float) -> None:
        """Emit events of streams together every `seconds`; 0: with each step. The first and the last event of a
        completion are never delayed."""
        self._interval = seconds
        if self._tick is not None:
            self._tick.cancel()
        self._asked = None
        self._ask_for_events()

    async def rows(self) -> list[EngineRow]:
        """Return all completions that decode or wait. Raises EngineStopped."""
        engine = self.attached
        rows = await asyncio.wrap_future(self._device.call(engine.rows))
        return [replace(row, request_id=row.request_id.rpartition("/")[0]) for row in rows]

    async def cancel(self, request_ids: Collection[str]) -> int:
        """End these requests: they answer with what they have, and `abort` as the reason. Returns how many ran."""
        own_ids = [own_id for own_id in self._channels if own_id.rpartition("/")[0] in request_ids]
        await self._call(lambda engine: engine.cancel(*own_ids))
        return len(own_ids)

    async def pause(self) -> None:
        """Freeze serving traffic where it is; rollouts and learning go on."""
        await self._call(lambda engine: engine.pause("serving"))

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._call(lambda engine: engine.resume("serving"))

    async def reset_caches(self) -> None:
        await self._call(lambda engine: engine.reset_caches())
        await asyncio.to_thread(give_back_memory)

    def emit(self, events: list[TokenEvent]) -> None:
        """Deliver events: one hop for all of them."""
        self._hop([(event.request_id, event) for event in events])

    def report(self, request_ids: list[str], error: Exception) -> None:
        """Deliver an error to requests that failed."""
        if not isinstance(error, ParallmError):
            error = EngineStopped(f"the step of this request failed: {error}")
        self._hop([(request_id, error) for request_id in request_ids])

    def _ask_for_events(self) -> None:
        interval, engine = self._interval, self._engine
        if engine is not None and (self._asked is None or self._asked.done()):
            with suppress(EngineStopped):
                self._asked = self._device.call(lambda: engine.hold_events(interval > 0))
        self._tick = self._loop.call_later(interval, self._ask_for_events) if interval else None

    async def _events(
        self, requests: Sequence[GenerationRequest], *, is_streaming: bool
    ) -> AsyncGenerator[TokenEvent, None]:
        engine = self.attached
        names = {request.request_id for request in requests}
        for request in requests:
            _validate(request, engine)
        if len(names) < len(requests) or names & self._names:
            raise InvalidRequest(f"of the request ids {sorted(names)[:8]} one is in use", "request_id")
        # The engine gets ids that no request had before: an event of an aborted request may still be on its way here
        own = {f"{request.request_id}/{next(self._count)}": request for request in requests}
        unfinished = sum(request.n for request in requests)
        channel = Channel()
        self._names |= names
        self._channels |= dict.fromkeys(own, channel)
        try:
            await self._call(lambda engine: _add_all(engine, own, is_streaming))
            while unfinished:
                for event in joined(await channel.received()):
                    unfinished -= event.completion is not None
                    yield _named(event, own[event.request_id].request_id)
        finally:
            self._names -= names
            for name in own:
                del self._channels[name]
            if unfinished and self._device.is_alive:
                self._device.call(lambda: engine.abort(*own))

    async def _call(self, function: Callable[[Engine], object]) -> None:
        """Run `function` on the device thread."""
        engine = self.attached
        await asyncio.wrap_future(self._device.call(lambda: function(engine)))

    def _hop(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        with suppress(RuntimeError):  # the loop has closed, and with it all consumers
            self._loop.call_soon_threadsafe(self._put, deliveries)

    def _put(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        for request_id, delivery in deliveries:
            if request_id in self._channels:
                self._channels[request_id].put(delivery)

    @property
    def attached(self) -> Engine:
        """The engine, for the device thread. Raises EngineStopped before `attach`, and after its end."""
        if self._engine is None or not self._device.is_alive:
            raise EngineStopped("the engine is not running; wait until the model is loaded, or restart the process")
        return self._engine


class Channel:
    """Events and errors of some requests that their reader has not taken yet."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._has_some = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._has_some.set()

    async def received(self) -> list[TokenEvent]:
        """All events, at least one. Raises an error as soon as it is the first."""
        await self._has_some.wait()
        events: list[TokenEvent] = []
        for place, delivery in enumerate(self._deliveries):
            if isinstance(delivery, Exception):
                if not events:
                    raise delivery
                del self._deliveries[:place]
                return events
            events.append(delivery)
        self._deliveries.clear()
        self._has_some.clear()
        return events


def joined(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """One event for each completion in `events`, in the order of their first ones."""
    if len(events) == 1:
        return list(events)
    by_completion: dict[tuple[str, int], list[TokenEvent]] = {}
    for event in events:
        by_completion.setdefault((event.request_id, event.index), []).append(event)
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_completion.values()]


def _joined(parts: list[TokenEvent]) -> TokenEvent:
    return TokenEvent(
        request_id=parts[0].request_id,
        index=parts[0].index,
        tokens=tuple(itertools.chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(itertools.chain.from_iterable(part.logprobs for part in parts)),
        top_logprobs=tuple(itertools.chain.from_iterable(part.top_logprobs for part in parts)),
        text="".join(part.text for part in parts),
        completion=parts[-1].completion,
    )


def _add_all(engine: Engine, requests: Mapping[str, GenerationRequest], is_streaming: bool) -> None:
    for request_id, request in requests.items():
        engine.add(replace(request, request_id=request_id), is_streaming)


def _named(event: TokenEvent, request_id: str) -> TokenEvent:
    # this runs for every token: `replace` takes three times as long
    return TokenEvent(
        request_id=request_id,
        index=event.index,
        tokens=event.tokens,
        logprobs=event.logprobs,
        top_logprobs=event.top_logprobs,
        text=event.text,
        completion=event.completion and replace(event.completion, request_id=request_id),
    )


def _validate(request: GenerationRequest, engine: Engine) -> None:
    """Refuse what can be refused before the device thread sees the request."""
    num_prompt, sampling, vocabulary = len(request.prompt_tokens), request.sampling, engine.model.vocabulary_size
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", "prompt")
    # two passes in C: for a step's long prompts a generator takes the event loop for a second
    if min(request.prompt_tokens) < 0 or max(request.prompt_tokens) >= vocabulary:
        raise InvalidRequest(f"token ids must be from 0 to {vocabulary - 1}", "prompt")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n} and must be at least 1", "n")
    _validate_sampling(sampling)
    if any(not 0 <= token < vocabulary for token, _ in sampling.logit_bias):
        raise InvalidRequest(f"token ids must be from 0 to {vocabulary - 1}", "logit_bias")
    if sampling.grammar is not None and sampling.min_tokens:
        raise InvalidRequest("a grammar decides where the completion may end; leave min_tokens out", "min_tokens")
    if num_prompt + sampling.max_tokens > engine.max_context:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {sampling.max_tokens}; this model's maximum context "
            f"length is {engine.max_context}; shorten them",
            "max_tokens",
            limit=engine.max_context,
            setting="engine.max_context",
        )


def _validate_sampling(sampling: SamplingParams) -> None:
    limits = {
        "max_tokens": (sampling.max_tokens >= 0, "at least 0"),
        "temperature": (0 <= sampling.temperature < math.inf, "0 or a positive number"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 for off, or positive"),
        "min_p": (0 <= sampling.min_p <= 1, "from 0 to 1"),
        "stop": (all(sampling.stop), "without empty strings"),
        "top_logprobs": (sampling.top_logprobs >= 0, "at least 0"),
        "presence_penalty": (-2 <= sampling.presence_penalty <= 2, "from -2 to 2"),
        "frequency_penalty": (-2 <= sampling.frequency_penalty <= 2, "from -2 to 2"),
        "repetition_penalty": (0 < sampling.repetition_penalty < math.inf, "positive"),
        "logit_bias": (all(abs(bias) <= 100 for _, bias in sampling.logit_bias), "from -100 to 100"),
        "prompt_logprobs": ((sampling.prompt_logprobs or 0) >= 0, "at least 0"),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, "from 0 to max_tokens"),
    }
    for name, (is_met, limit) in limits.items():
        if not is_met:
            raise InvalidRequest(f"{name} is {getattr(sampling, name)!r} and must be {limit}", name)
