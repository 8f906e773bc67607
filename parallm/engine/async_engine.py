"""The engine as asyncio code sees it: the only hop between the asyncio thread and the device thread."""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import chain

from parallm.device.memory import give_back_memory
from parallm.device.thread import DeviceThread
from parallm.engine.engine import Engine
from parallm.engine.kv.budget import max_rows
from parallm.errors import ContextTooLong, EngineStopped, InvalidRequest, ParallmError
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent, TrafficClass


def joined(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """One event for each completion that `events` tell of, in the order of their first ones."""
    if len(events) == 1:
        return list(events)
    of_completions: dict[tuple[str, int], list[TokenEvent]] = {}
    for event in events:
        of_completions.setdefault((event.request_id, event.index), []).append(event)
    return [_one(parts) for parts in of_completions.values()]


def _one(parts: list[TokenEvent]) -> TokenEvent:
    if len(parts) == 1:
        return parts[0]
    return TokenEvent(
        request_id=parts[0].request_id,
        index=parts[0].index,
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        top_logprobs=tuple(chain.from_iterable(part.top_logprobs for part in parts)),
        text="".join(part.text for part in parts),
        completion=parts[-1].completion,
    )


Delivery = TokenEvent | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    """Completions that decode now."""
    num_waiting: int
    """Requests that wait for rows."""
    tokens_total: Mapping[TrafficClass, int]
    """Sampled tokens since the start."""
    max_rows: int
    """Completions that can decode at the same time."""
    kv_bytes: int
    """Bytes of keys, values and states that rows and prompts hold, as of the last unit of work."""
    kv_bytes_limit: int
    num_preemptions: int
    """Times since the start that a row or a prompt has given up its memory, to be computed again later."""
    prefix_bytes: int
    """Of `kv_bytes`, what is kept for prompts that begin with the same tokens."""
    num_prefix_lookups: int
    """Prompts since the start whose beginning was looked for."""
    num_prefix_hits: int
    prompt_tokens_total: int
    """Tokens of prompts begun since the start; what preempted rows compute again counts."""
    cached_prompt_tokens_total: int
    """Of these, those that were known and not computed."""
    num_drafts: int
    """Times since the start that a row was fed proposed tokens."""
    draft_tokens_total: int
    """Of these, the tokens."""
    accepted_draft_tokens_total: int
    """Of these, those that were what the policy sampled."""


class AsyncEngine:
    """Generate and stream. Made and used on one asyncio loop; `emit` and `report` are called on the device thread."""

    def __init__(self, device: DeviceThread, loop: asyncio.AbstractEventLoop) -> None:
        self._device = device
        self._loop = loop
        self._engine: Engine | None = None
        self._names: set[str] = set()  # request ids in use
        self._count = itertools.count()
        self._channels: dict[str, asyncio.Queue[Delivery]] = {}  # by the id that the engine knows

    def attach(self, engine: Engine) -> None:
        """Start to serve; before this every request is refused."""
        self._engine = engine
        self._device.attach(engine)

    @property
    def is_alive(self) -> bool:
        return self._engine is not None and self._device.is_alive

    @property
    def max_context(self) -> int:
        return self._attached().max_context

    def stats(self) -> EngineStats:
        engine = self._attached()
        prefixes = engine.memory.prefixes
        return EngineStats(
            num_running=engine.num_running(),
            num_waiting=engine.num_waiting(),
            tokens_total=engine.num_tokens(),
            max_rows=max_rows(engine.settings),
            kv_bytes=engine.memory.used,
            kv_bytes_limit=engine.memory.limit,
            num_preemptions=engine.scheduler.num_preempted,
            prefix_bytes=prefixes.nbytes,
            num_prefix_lookups=prefixes.num_lookups,
            num_prefix_hits=prefixes.num_hits,
            prompt_tokens_total=engine.prefill.num_prompt_tokens,
            cached_prompt_tokens_total=engine.prefill.num_cached_tokens,
            num_drafts=engine.speculation.num_drafts,
            draft_tokens_total=engine.speculation.num_drafted,
            accepted_draft_tokens_total=engine.speculation.num_accepted,
        )

    async def ping(self) -> None:
        """Returns when the device thread has come by, between two units of work. Raises EngineStopped."""
        self._attached()
        await asyncio.wrap_future(self._device.call(lambda: None))

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All completions of a request, by index. Cancelling the task aborts the request.

        Raises InvalidRequest, ContextTooLong, UnknownModel, EngineFull, EngineStopped.
        """
        return (await self.generate_all([request]))[0]

    async def generate_all(
        self, requests: Sequence[GenerationRequest], progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """`generate` for several requests, which the engine gets at the same moment.

        So the same requests make the same batches, and with them the same numbers, in every run without other traffic.
        `progress` is called with the number of finished completions each time that one ends.
        """
        completions: dict[str, list[Completion]] = {request.request_id: [] for request in requests}
        num_finished = 0
        async with aclosing(self._events(requests, streams=False)) as events:
            async for event in events:
                if event.completion is not None:
                    completions[event.request_id].append(event.completion)
                    num_finished += 1
                    if progress is not None:
                        progress(num_finished)
        return [sorted(made, key=lambda completion: completion.index) for made in completions.values()]

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Events of all completions as they come; closing the iterator aborts the request. Raises as `generate`.

        What comes while the consumer is elsewhere waits for it, joined: at most one event for each completion.
        """
        return self._events([request], streams=True)

    async def cancel(self, request_ids: Collection[str]) -> int:
        """End these requests: they answer with what they have, and `abort` as the reason. Returns how many ran."""
        engine = self._attached()
        own = [name for name in self._channels if name.rpartition("/")[0] in request_ids]
        await asyncio.wrap_future(self._device.call(lambda: engine.cancel(*own)))
        return len(own)

    async def hold(self) -> None:
        """Freeze serving traffic where it is; rollouts and learning go on."""
        engine = self._attached()
        await asyncio.wrap_future(self._device.call(lambda: engine.hold("serving")))

    async def release(self) -> None:
        """Undo `hold`."""
        engine = self._attached()
        await asyncio.wrap_future(self._device.call(lambda: engine.release("serving")))

    async def reset_caches(self) -> None:
        engine = self._attached()
        await asyncio.wrap_future(self._device.call(engine.reset_caches))
        await asyncio.to_thread(give_back_memory)

    def emit(self, events: list[TokenEvent]) -> None:
        """Deliver one unit's events: one hop for all of them."""
        self._hop([(event.request_id, event) for event in events])

    def report(self, request_ids: list[str], error: Exception) -> None:
        """Deliver an error to requests that failed."""
        known = error if isinstance(error, ParallmError) else EngineStopped(f"the step of this request failed: {error}")
        self._hop([(request_id, known) for request_id in request_ids])

    async def _events(
        self, requests: Sequence[GenerationRequest], *, streams: bool
    ) -> AsyncGenerator[TokenEvent, None]:
        engine = self._attached()
        names = {request.request_id for request in requests}
        for request in requests:
            _validate(request, engine)
        if len(names) < len(requests) or names & self._names:
            raise InvalidRequest(f"of the request ids {sorted(names)[:8]} one is in use", "request_id")
        # The engine gets ids that no request had before: an event of an aborted request may still be on its way here
        own = {f"{request.request_id}/{next(self._count)}": request for request in requests}
        channel: asyncio.Queue[Delivery] = asyncio.Queue()
        self._names |= names
        self._channels |= dict.fromkeys(own, channel)
        unfinished = sum(request.n for request in requests)
        try:
            await asyncio.wrap_future(self._device.call(lambda: _add_all(engine, own, streams)))
            while unfinished:
                for event in joined(await _waiting(channel)):
                    unfinished -= event.completion is not None
                    yield _named(event, own[event.request_id].request_id)
        finally:
            self._names -= names
            for name in own:
                del self._channels[name]
            if unfinished and self._device.is_alive:
                self._device.call(lambda: engine.abort(*own))

    def _hop(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits for these any more
            self._loop.call_soon_threadsafe(self._put, deliveries)

    def _put(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        for request_id, delivery in deliveries:
            if request_id in self._channels:
                self._channels[request_id].put_nowait(delivery)

    def _attached(self) -> Engine:
        if self._engine is None or not self._device.is_alive:
            raise EngineStopped("the engine is not running; wait until the model is loaded, or restart the process")
        return self._engine


async def _waiting(channel: asyncio.Queue[Delivery]) -> list[TokenEvent]:
    """All that has come meanwhile, at least one. Raises an error as soon as it is the first."""
    events: list[TokenEvent] = []
    delivery = await channel.get()
    while not isinstance(delivery, Exception):
        events.append(delivery)
        if channel.empty():
            return events
        delivery = channel.get_nowait()
    if not events:
        raise delivery
    channel.put_nowait(delivery)  # nothing of these requests comes after an error
    return events


def _add_all(engine: Engine, requests: Mapping[str, GenerationRequest], streams: bool) -> None:
    for request_id, request in requests.items():
        engine.add(replace(request, request_id=request_id), streams)


def _named(event: TokenEvent, request_id: str) -> TokenEvent:
    made = event.completion
    # this runs for every token: `replace` takes three times as long
    return TokenEvent(
        request_id=request_id,
        index=event.index,
        tokens=event.tokens,
        logprobs=event.logprobs,
        top_logprobs=event.top_logprobs,
        text=event.text,
        completion=made and replace(made, request_id=request_id),
    )


def _validate(request: GenerationRequest, engine: Engine) -> None:
    """Everything that can be refused before the device thread sees the request."""
    num_prompt, sampling = len(request.prompt_tokens), request.sampling
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", "prompt")
    # two passes in C: for a step's long prompts a generator takes the event loop for a second
    if min(request.prompt_tokens) < 0 or max(request.prompt_tokens) >= engine.model.vocabulary_size:
        raise InvalidRequest(f"token ids must be from 0 to {engine.model.vocabulary_size - 1}", "prompt")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n} and must be at least 1", "n")
    _validate_sampling(sampling)
    if any(not 0 <= token < engine.model.vocabulary_size for token, _ in sampling.logit_bias):
        raise InvalidRequest(f"token ids must be from 0 to {engine.model.vocabulary_size - 1}", "logit_bias")
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
    engine.memory.check(request)


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
