"""Thousands of ragged requests through one engine: what is lost, what memory is held, what is traced, what faults end.

Rounds of requests that come within moments of each other: many lengths, classes, versions and ways of sampling, groups,
beginnings that others had, clients that leave and requests that are cancelled, in memory that is short. Each round
publishes a version; each fifth ends with a fault inside a decode step, after which caches are emptied and memory is
read.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx
from bench.workers.memory import settled
from bench.workers.workbench import Workbench, open_workbench, random_adapter

from parallm.engine import decode_batch
from parallm.engine.decode_batch import row_bucket
from parallm.engine.decoder import Decoder
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.shapes import EMPTY, MIN_POSITIONS, BufferShape, grown, in_quarters
from parallm.errors import EngineStopped
from parallm.model.kernels.cuda import on_cuda
from parallm.types import BASE, POLICY, Completion, GenerationRequest, SamplingParams

BEGINNINGS, MAX_BEGINNING, MAX_END = 24, 160, 60
MEAN_TOKENS, MAX_TOKENS = 14, 96
WAYS = ("answer",) * 7 + ("leave", "close", "cancel")
FAULT_ROWS = 4
ROUNDS_OF_PART = 5
INJECTED = "injected"
SECONDS_TO_ANSWER = 120.0
"""After which a request counts as lost."""


class Soak:
    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._random = random.Random(1)
        words = bench.model.vocabulary_size
        self._beginnings = [self._tokens(self._random.randint(16, MAX_BEGINNING), words) for _ in range(BEGINNINGS)]
        self.ends: Counter[str] = Counter()

    async def round(self, number: int, size: int) -> None:
        """A round's requests, until each has ended in its way."""
        if number:
            adapter = await self._bench.on_device(partial(random_adapter, self._bench.model, number + 1, number))
            await self._bench.on_device(partial(self._bench.table.publish, adapter))
        requests = [self._request(f"{number}-{place}", number + 1) for place in range(size)]
        for end in await asyncio.gather(*(self._play(one) for one in requests)):
            self.ends[end] += 1

    async def fault(self) -> tuple[int, int, float]:
        """A step of serving raises an error: how many requests ended with it, how many of rollouts did too or were
        lost, and the seconds that the next one took."""
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [
            replace(self._request(f"fault-{traffic}-{place}", 0), sampling=sampling, n=1, model=BASE, traffic=traffic)
            for traffic in ("serving", "rollout")
            for place in range(FAULT_ROWS)
        ]
        launch, left = Decoder.launch, 1

        def failing(decoder: Decoder) -> list[mx.array]:
            nonlocal left
            if left and len(decoder.sequences) > 1 and decoder.sequences[0].request.traffic == "serving":
                left -= 1
                raise RuntimeError(INJECTED)
            return launch(decoder)

        with mock.patch.object(Decoder, "launch", failing):
            tasks = [asyncio.create_task(self._bench.engine.generate(one)) for one in requests]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        began = time.perf_counter()
        await self._bench.engine.generate(replace(requests[0], request_id="next"))
        seconds = time.perf_counter() - began
        failed = [isinstance(one, EngineStopped) and INJECTED in str(one) for one in done]
        others = [one for one in done[FAULT_ROWS:] if isinstance(one, BaseException)]
        strange = [one for one, has in zip(done[:FAULT_ROWS], failed, strict=False) if _is_error(one) and not has]
        return sum(failed[:FAULT_ROWS]), len(others) + len(strange), seconds

    def _request(self, name: str, newest: int) -> GenerationRequest:
        pick, words = self._random, self._bench.model.vocabulary_size
        beginning = pick.choice(self._beginnings)
        tokens = min(MAX_TOKENS, 1 + int(pick.expovariate(1 / MEAN_TOKENS)))
        traffic = pick.choice(("serving", "serving", "rollout"))
        models = (BASE, POLICY, POLICY, f"{POLICY}@{max(1, newest - pick.randint(0, 2))}")
        return GenerationRequest(
            request_id=name,
            prompt_tokens=beginning[: pick.randint(1, len(beginning))] + self._tokens(pick.randint(1, MAX_END), words),
            sampling=SamplingParams(
                max_tokens=tokens,
                temperature=pick.choice((0.0, 0.7, 1.0)),
                top_p=pick.choice((1.0, 1.0, 0.9)),
                top_k=pick.choice((0, 0, 20)),
                seed=pick.randrange(1 << 30),
                top_logprobs=pick.choice((0, 0, 0, 3)),
                frequency_penalty=pick.choice((0.0, 0.0, 0.0, 0.5)),
                stop=pick.choice(((), (), ("7",))),
                ignore_eos=pick.random() < 0.3,
                prompt_logprobs=pick.choice((None, None, None, None, 1)),
            ),
            n=pick.choice((1, 1, 1, 2, 4)),
            model=pick.choice(models),
            traffic=traffic,  # type: ignore[arg-type]  # one of the two names
            switches_in_flight=traffic == "rollout" and pick.random() < 0.3,
            is_continued=pick.random() < 0.5,
        )

    def _tokens(self, count: int, words: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, words) for _ in range(count))

    async def _play(self, request: GenerationRequest) -> str:
        """One client; how its request ended: answered, left, or `lost` where it is not as it should be."""
        way, patience = self._random.choice(WAYS), 0.3 * self._random.random()
        await asyncio.sleep(0.2 * self._random.random())
        engine = self._bench.engine
        if way == "close":
            async with aclosing(engine.stream(request)) as events:
                async for _ in events:
                    break
            return "left"
        task = asyncio.create_task(engine.generate(request))
        if way == "answer":
            return _judged(request, await _answered(task), ("stop", "length"))
        await asyncio.wait([task], timeout=patience)
        if way == "cancel":
            await engine.cancel([request.request_id])
            return _judged(request, await _answered(task), ("stop", "length", "abort"))
        task.cancel()
        await asyncio.wait([task])
        return "left"


async def _answered(task: asyncio.Task[list[Completion]]) -> list[Completion]:
    """Nothing of a request that is never answered."""
    try:
        return await asyncio.wait_for(task, SECONDS_TO_ANSWER)
    except TimeoutError:
        return []


def _is_error(one: object) -> bool:
    return isinstance(one, BaseException)


def _judged(request: GenerationRequest, made: Sequence[Completion], reasons: Sequence[str]) -> str:
    fits = len(made) == request.n and all(
        one.finish_reason in reasons
        and len(one.tokens) == len(one.logprobs) <= request.sampling.max_tokens
        and sum(span.end - span.start for span in one.weight_versions) == len(one.tokens)
        for one in made
    )
    return "answered" if fits else "lost"


async def main(*, requests: int, rounds: int, rows: int, kv_cache_bytes: int, compiles: bool = False) -> dict[str, Any]:
    """`compiles`: decode steps are compiled, as they are with MLX's CUDA build."""
    traces: list[int] = []
    set_traced = AttentionMetadata.set_traced

    def noted(self: AttentionMetadata, lengths_B: mx.array, slots_B: mx.array, num_positions: int) -> None:
        traces.append(num_positions)
        set_traced(self, lengths_B, slots_B, num_positions)

    with (
        mock.patch.object(AttentionMetadata, "set_traced", noted),
        mock.patch.object(decode_batch, "on_cuda", return_value=compiles or on_cuda()),
    ):
        async with open_workbench(rows=rows, kv_cache_bytes=kv_cache_bytes) as bench:
            soak, sizes, faults = Soak(bench), [], []
            for number in range(rounds):
                await soak.round(number, requests // rounds)
                if number % ROUNDS_OF_PART == ROUNDS_OF_PART - 1:
                    async with asyncio.timeout(SECONDS_TO_ANSWER):
                        faults.append(await soak.fault())
                    await bench.engine.reset_caches()
                    sizes.append(await bench.on_device(partial(settled, bench.streams.handles)))
            stats = bench.engine.stats()
            buckets = num_buckets(rows, bench.engine.max_context) * bench.streams.width
    return {
        "ends": dict(soak.ends),
        "active": sizes,
        "held": stats.kv_bytes - stats.prefix_bytes,
        "preemptions": stats.num_preemptions,
        "prefix_hits": stats.num_prefix_hits,
        "traces": len(traces),
        "buckets": buckets,
        "failed_in_step": sum(one for one, _, _ in faults),
        "failed_besides": sum(one for _, one, _ in faults),
        "next_seconds": [seconds for _, _, seconds in faults],
    }


def num_buckets(max_rows: int, max_positions: int) -> int:
    """Shapes that compiled steps can have: rows, slots for them, positions, with an adapter and without."""
    buckets = {row_bucket(rows) for rows in range(1, max_rows + 1)}
    slots = buckets | {grown(BufferShape(rows, 1), EMPTY).num_slots for rows in buckets}
    positions = {in_quarters(MIN_POSITIONS, length) for length in range(1, max_positions + 2)}
    positions |= {grown(BufferShape(1, length), EMPTY).num_positions for length in positions}
    return 2 * len(positions) * sum(rows <= some for rows in buckets for some in slots)
