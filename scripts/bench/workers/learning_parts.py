"""Updates, and serving beside them, of shapes with random weights, part by part in one process.

ragged, equal: updates on completions of all lengths, and on as many tokens in rows of one length; short: ragged rows in
short passes; half: the same with half of the memory that `ragged` of the first shape took at most; rectangles: by the
path that devices without our kernels take. streams: tokens and times between tokens of streams alone and in each mode
of learning beside them. publish: milliseconds of publishing while they decode. memory: bytes of the process, and of one
that holds a second copy of the base.
"""

import asyncio
import gc
import itertools
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx

from bench.clients import Traffic
from bench.workers.loads import (
    LEARNING_MODES,
    SHAPES,
    Layout,
    LearningLoad,
    LearningMode,
    equal_layout,
    ragged_layout,
    random_prompts,
)
from bench.workers.memory import settled
from bench.workers.parallm_update import random_groups
from bench.workers.publish_speed import measure as measure_publish
from bench.workers.random_model import random_base
from bench.workers.workbench import Workbench, open_workbench
from parallm.errors import ParallmError
from parallm.learner.passes import lm_head, packing
from parallm.reports import UpdateReport
from parallm.types import POLICY, GenerationRequest, SamplingParams, TrajectoryGroup

LEARNING_RATE = 1e-6
PASS_OF_RECTANGLES, SHORT_PASS = 5120, 2048
"""Tokens: what 8B passes take by default on an H200; what leaves a quantized base half of their memory."""
LIMIT_OF_PEAK = 0.49
"""MLX launches ahead as far as the memory allows, and what is in flight counts; a device of this size would hold it
back, so does its limit."""


Part = Awaitable[dict[str, Any]] | AsyncIterator[dict[str, Any]]
"""Its result, or what is known of it so far."""


class Parts:
    def __init__(self, bench: Workbench, shape: str, load: LearningLoad, peak_gb: float | None) -> None:
        """`peak_gb`: of the shape before, where `half` needs it."""
        self._bench = bench
        self._peak_gb = peak_gb
        self._shape = SHAPES[shape]
        self._load = load
        self._layout = ragged_layout(load.groups, load.group_size, load.prompt, load.lengths)

    def all(self) -> Mapping[str, Callable[[], Part]]:
        return {
            "ragged": partial(self.updates, self._layout),
            "equal": partial(self.updates, equal_layout(self._layout)),
            "short": partial(self.updates, self._layout, micro_batch_tokens=SHORT_PASS),
            "half": self.half,
            "rectangles": self.rectangles,
            "streams": self.streams,
            "publish": self.publish,
            "memory": self.memory,
        }

    async def updates(self, layout: Layout, **settings: Any) -> dict[str, Any]:
        learner = await self._bench.make_learner(LEARNING_RATE, **settings)
        groups = self._groups(layout)
        seconds = []
        for step in range(self._load.repeats + 1):
            if step == 1:
                await self._bench.on_device(mx.reset_peak_memory)
            began = time.perf_counter()
            await self._bench.update(learner, groups, step, self._load.lengths[1])
            seconds.append(time.perf_counter() - began)
        tokens = sum(sum(completions) for _, completions in layout)
        peak = await self._bench.on_device(mx.get_peak_memory)
        return {"tokens": tokens, "first": seconds[0], "seconds": seconds[1:], "peak_gb": peak / 1e9}

    async def half(self) -> dict[str, Any]:
        if self._peak_gb is None:
            raise ValueError("half: another shape's `ragged` comes first")
        bytes_allowed = int(LIMIT_OF_PEAK * 1e9 * self._peak_gb)
        before = await self._bench.on_device(lambda: mx.set_memory_limit(bytes_allowed))
        try:
            return await self.updates(self._layout, micro_batch_tokens=SHORT_PASS)
        finally:
            await self._bench.on_device(lambda: mx.set_memory_limit(before))

    async def rectangles(self) -> dict[str, Any]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(packing, "attends_by_rectangles", return_value=True))
            stack.enter_context(mock.patch.object(lm_head, "has_kernels", return_value=False))
            return await self.updates(self._layout, micro_batch_tokens=PASS_OF_RECTANGLES)

    async def streams(self) -> AsyncIterator[dict[str, Any]]:
        """All modes so far, whenever one more is there; in the end the streams alone are those after them, too."""
        load, governor = self._load, self._bench.device.governor
        served = ragged_layout(load.served_groups, load.group_size, load.prompt, load.lengths)
        groups = self._groups(served)
        learner = await self._bench.make_learner(LEARNING_RATE)
        steps = itertools.count()

        async def update() -> UpdateReport:
            return await self._bench.update(learner, groups, next(steps), load.lengths[1])

        found: dict[str, Any] = {}
        async with self._streaming() as measured:
            for _ in range(2):  # all that is compiled for streams, for updates and for both
                await measured(asyncio.sleep(load.seconds / 3))
                await update()
            before = await measured(asyncio.sleep(load.seconds / 3))
            found["alone"] = asdict(before)
            for name, mode in LEARNING_MODES.items():
                governor.engine_share, governor.serving_latency_target = mode.engine_share, mode.latency_target
                updates: list[float] = []
                traffic = await measured(self._learning(update, mode, updates))
                found[name] = asdict(traffic) | {"updates_per_minute": 60 * len(updates) / traffic.seconds}
                found[name]["update_seconds"] = updates
                yield found
            governor.engine_share, governor.serving_latency_target = 0.5, None
            after = await measured(asyncio.sleep(load.seconds / 3))
        alone = Traffic(gaps=before.gaps + after.gaps, first=before.first + after.first)
        alone.tokens, alone.seconds = before.tokens + after.tokens, before.seconds + after.seconds
        alone.errors = before.errors + after.errors
        yield found | {"alone": asdict(alone)}

    async def _learning(
        self, update: Callable[[], Awaitable[UpdateReport]], mode: LearningMode, seconds: list[float]
    ) -> None:
        """Updates at the rate of `mode`, of which `seconds` gets the times. Without a rate the last one begins so early
        that streams get what a latency target owes them after it."""
        began = time.perf_counter()
        seconds_of_mode = self._load.seconds * mode.share
        ends = began + seconds_of_mode
        period = 60 / mode.updates_per_minute if mode.updates_per_minute else 0.0
        last = ends if period else ends - seconds_of_mode / 4
        while (start := began + period * len(seconds)) < ends and time.perf_counter() < last:
            await asyncio.sleep(max(0.0, start - time.perf_counter()))
            called = time.perf_counter()
            await update()
            seconds.append(time.perf_counter() - called)
        await asyncio.sleep(max(0.0, ends - time.perf_counter()))

    @asynccontextmanager
    async def _streaming(self) -> AsyncIterator[Callable[[Awaitable[None]], Awaitable[Traffic]]]:
        """Streams that run one request after the other; gives what notes their traffic during something else."""
        over, notes = asyncio.Event(), [Traffic()]

        async def measured(work: Awaitable[None]) -> Traffic:
            notes[0] = traffic = Traffic()
            began = time.perf_counter()
            await work
            traffic.seconds, notes[0] = time.perf_counter() - began, Traffic()
            return traffic

        clients = [asyncio.create_task(self._stream(requests, notes, over)) for requests in self._requests()]
        try:
            yield measured
        finally:
            over.set()
            await asyncio.gather(*clients)

    async def _stream(
        self, requests: Iterator[GenerationRequest], notes: Sequence[Traffic], over: asyncio.Event
    ) -> None:
        while not over.is_set():
            last, is_first = time.perf_counter(), True
            try:
                async for event in self._bench.engine.stream(next(requests)):
                    now, traffic = time.perf_counter(), notes[0]
                    (traffic.first if is_first else traffic.gaps).append(now - last)
                    traffic.tokens += len(event.tokens)
                    last, is_first = now, False
                    if over.is_set():
                        break
                else:
                    notes[0].finished += 1
            except ParallmError as error:
                notes[0].errors.append(str(error))
                await asyncio.sleep(0.1)

    def _requests(self) -> list[Iterator[GenerationRequest]]:
        """Those of each stream: prompts that no other request has, answers of other lengths."""
        low, high = self._load.outputs

        def of_stream(place: int) -> Iterator[GenerationRequest]:
            for turn in range(1_000_000):
                (prompt,) = random_prompts(self._shape["vocab_size"], 1, self._load.prompt, 1000 * turn + place)
                length = low + (37 * place + 91 * turn) % (high - low + 1)
                sampling = SamplingParams(max_tokens=length, ignore_eos=True)
                name = f"stream-{place}-{turn}"
                yield GenerationRequest(
                    request_id=name, prompt_tokens=prompt, sampling=sampling, model=POLICY, traffic="serving"
                )

        return [of_stream(place) for place in range(self._load.streams)]

    async def publish(self) -> dict[str, Any]:
        """While one stream less decodes than the engine has rows: the request that asks for the new version has one."""
        rows = self._load.streams - 1
        return dict(await measure_publish(self._bench, None, self._load.publishes, rows, seconds_between=0.02))

    async def memory(self) -> dict[str, Any]:
        learner = await self._bench.make_learner(LEARNING_RATE)
        groups = self._groups(self._layout)
        await self._bench.update(learner, groups, 0, self._load.lengths[1])
        shared = await self._bench.on_device(settled)

        def with_copy() -> int:
            copy = random_base(self._shape)
            mx.eval(copy.parameters())
            return settled()

        return {"shared": shared, "two_copies": await self._bench.on_device(with_copy)}

    def _groups(self, layout: Layout) -> list[TrajectoryGroup]:
        return random_groups(layout, self._shape["vocab_size"])


async def main(
    *, jobs: Sequence[tuple[str, str, Sequence[str]]], load: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """`jobs`: names, shapes and their parts. A part that fails costs its own figures only, as does a shape that fails
    to load."""
    chosen = LearningLoad(**{name: tuple(one) if isinstance(one, list) else one for name, one in load.items()})
    peak_gb: float | None = None
    for label, shape, names in jobs:
        try:
            async for part in run_shape(shape, names, chosen, peak_gb):
                peak_gb = peak_gb or part.get("peak_gb")
                yield part | {"part": f"{label}.{part['part']}"}
        except ParallmError as error:
            yield {"part": label, "error": str(error)}
        gc.collect()  # of the shape before nothing is left when the next one notes its peak


async def run_shape(
    shape: str, names: Sequence[str], load: LearningLoad, peak_gb: float | None
) -> AsyncIterator[dict[str, Any]]:
    async with open_workbench(shape=shape, rows=load.streams, kv_cache_bytes=load.kv_cache_bytes) as bench:
        parts = Parts(bench, shape, load, peak_gb).all()
        for name in names:
            async for result in attempt(parts[name]):
                yield {"part": name, **result}
            await bench.on_device(settled)


async def attempt(part: Callable[[], Part]) -> AsyncIterator[dict[str, Any]]:
    try:
        result = part()
        if isinstance(result, Awaitable):
            yield await result
        else:
            async for one in result:
                yield one
    except Exception as error:  # noqa: BLE001  # whatever it was, the other parts are measured
        traceback.print_exc()
        yield {"error": f"{type(error).__name__}: {error}"}
