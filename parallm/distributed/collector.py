"""Sampling in shares: problem p of a draw belongs to worker p modulo their number, and all get all groups.

Seeds follow from step and place, so it does not matter who samples.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallm.distributed.exchange import Exchange
from parallm.distributed.wire import pack_episodes, pack_groups, unpack_episodes, unpack_groups
from parallm.errors import WorkersDiffer
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.scoring import ScoredEpisode
from parallm.types import GenerationRequest, Problem, TrajectoryGroup

Result = TypeVar("Result")


class SharedCollector(Collector):
    """A collector that plays its share and gathers the others'.

    Several steps may be collected at a time. All workers draw problems in one order, which depends on no clock: a step
    refills after the first draws of the steps ahead of it, and after the refills of the step before.
    """

    def __init__(self, *arguments: Any, exchange: Exchange, ahead: int) -> None:
        """`arguments`: those of `Collector`. `ahead`: steps that may be collected beside the oldest one."""
        super().__init__(*arguments)
        self._exchange = exchange
        self._ahead = ahead
        self._label = ""  # of the draw that `_play` is called for
        self._attempts: Counter[int] = (
            Counter()
        )  # collections of each step: parts of one that was given up are no parts
        self._newest = -1  # the latest step that has drawn
        self._drawn: dict[int, tuple[list[Problem], int]] = {}  # first draws of steps that have not begun
        self._ends: dict[int, asyncio.Event] = {}  # of the collections under way

    async def collect(self, step: int, model: str) -> RolloutBatch:
        self._attempts[step] += 1
        end = self._ends[step] = asyncio.Event()
        try:
            return await super().collect(step, model)
        finally:
            del self._ends[step]
            end.set()

    def give_up(self, steps: Iterable[int]) -> None:
        super().give_up([*steps, *self._drawn])  # how many have drawn early depends on the clock
        self._drawn, self._newest = {}, -1

    def _draw(self, count: int, step: int) -> tuple[list[Problem], int]:
        self._newest = max(self._newest, step)
        return self._drawn.pop(step, None) or super()._draw(count, step)  # refills find no early draw: it is taken

    async def _sample(self, problems: Sequence[Problem], step: int, start: int, model: str) -> list[TrajectoryGroup]:
        self._label = f"groups of step {step + 1} from {start} on, attempt {self._attempts[step]}"
        groups = await super()._sample(problems, step, start, model)
        if not self._settings.refill_rounds:
            return groups  # first draws are in the order of the steps by themselves
        if before := self._ends.get(step - 1):
            await before.wait()
        while self._newest < step + self._ahead:
            following = self._newest + 1
            self._drawn[following] = self._draw(self._settings.problems_per_step, following)
        return groups

    async def _play(self, numbered: Sequence[tuple[int, Problem]], step: int, model: str) -> list[TrajectoryGroup]:
        label, own = self._label, slice(self._exchange.rank, None, self._exchange.size)
        groups: list[TrajectoryGroup] = []
        if numbered[own]:
            groups = await unless_lost(self._exchange, super()._play(numbered[own], step, model))
        parts = await asyncio.wrap_future(self._exchange.all_gather(label, pack_groups(groups)))
        problems = [problem for _, problem in numbered]
        merged: list[TrajectoryGroup | None] = [None] * len(problems)
        for rank, part in enumerate(parts):
            share = slice(rank, None, len(parts))
            try:
                merged[share] = groups if share == own else unpack_groups(part, problems[share])
            except WorkersDiffer as error:
                self._exchange.fail(f"rank {rank} and rank {self._exchange.rank} differ: {error}")
                raise
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
        parts = await asyncio.wrap_future(self.exchange.all_gather(label, pack_episodes(episodes)))
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
