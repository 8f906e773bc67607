"""Sampling in shares: problem p of a draw belongs to worker p modulo their number, and all get all groups.

Seeds follow from step and place, so it does not matter who samples.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from parallm.distributed.exchange import Exchange
from parallm.distributed.wire import pack_episodes, pack_groups, unpack_episodes, unpack_groups
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.scoring import ScoredEpisode
from parallm.types import GenerationRequest, Problem, TrajectoryGroup

Result = TypeVar("Result")


class SharedCollector(Collector):
    """A collector that plays its share and gathers the others'."""

    def __init__(self, *arguments: Any, exchange: Exchange) -> None:
        """`arguments`: those of `Collector`."""
        super().__init__(*arguments)
        self._exchange = exchange
        # A step that refills draws again once all groups are here: in turns with another step's draws the order would
        # depend on the clock. One that does not draws as it begins, and the next step does not wait for stragglers.
        self._drawing = asyncio.Lock() if self._settings.refill_rounds else nullcontext()
        self._label = ""  # of the draw that `_play` is called for
        self._attempts: Counter[int] = (
            Counter()
        )  # collections of each step: parts of one that was given up are no parts

    async def collect(self, step: int, model: str) -> RolloutBatch:
        self._attempts[step] += 1
        async with self._drawing:
            return await super().collect(step, model)

    async def _sample(self, problems: Sequence[Problem], step: int, start: int, model: str) -> list[TrajectoryGroup]:
        self._label = f"groups of step {step + 1} from {start} on, attempt {self._attempts[step]}"
        return await super()._sample(problems, step, start, model)

    async def _play(self, numbered: Sequence[tuple[int, Problem]], step: int, model: str) -> list[TrajectoryGroup]:
        label, own = self._label, slice(self._exchange.rank, None, self._exchange.size)
        groups: list[TrajectoryGroup] = []
        if numbered[own]:
            groups = await unless_lost(self._exchange, super()._play(numbered[own], step, model))
        parts = await asyncio.wrap_future(self._exchange.gather(label, pack_groups(groups)))
        problems = [problem for _, problem in numbered]
        merged: list[TrajectoryGroup | None] = [None] * len(problems)
        for rank, part in enumerate(parts):
            share = slice(rank, None, len(parts))
            merged[share] = groups if share == own else unpack_groups(part, problems[share])
        return [group for group in merged if group is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEvaluator(Evaluator):
    """An evaluator that answers its share of the problems and gathers the others' episodes."""

    exchange: Exchange

    async def _play(
        self, problems: Sequence[Problem], requests: Sequence[GenerationRequest], progress: Callable[[int], None]
    ) -> list[list[ScoredEpisode]]:
        own = slice(self.exchange.rank, None, self.exchange.size)
        episodes = (
            # a class with slots is made anew, so super() without arguments does not find it
            await unless_lost(self.exchange, Evaluator._play(self, problems[own], requests[own], progress))
            if requests[own]
            else []
        )
        label = f"episodes of {requests[0].request_id}"
        parts = await asyncio.wrap_future(self.exchange.gather(label, pack_episodes(episodes)))
        merged: list[list[ScoredEpisode]] = [[] for _ in requests]
        for rank, part in enumerate(parts):
            share = slice(rank, None, len(parts))
            merged[share] = unpack_episodes(part, problems[share], requests[share])
        return merged


async def unless_lost(exchange: Exchange, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. Raises ExchangeFailed as soon as the exchange ends, after `work` was cancelled."""
    task, lost = asyncio.ensure_future(work), asyncio.wrap_future(exchange.loss())
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        return task.result()
    finally:
        lost.cancel()
        task.cancel()
        await asyncio.wait((task,))
