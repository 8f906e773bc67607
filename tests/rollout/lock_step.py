"""Seconds of steps of episodes of several turns, whose environment takes its time; each at its own pace, or all in lock
step; one step after the other, or the next one sampled ahead.

Lengths of turns and seconds of replies lie between bounds and are as likely anywhere on a logarithmic scale. They
follow from the request and the turns, so that both ways do the same work.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import cast

from bench.problems import load_problems
from bench.workers.workbench import open_workbench

from parallm.engine.settings import SpeculationSettings
from parallm.environment.environment import RewardParts
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.runner import Generate, RolloutRunner
from parallm.rollout.scoring import ScoredEpisode
from parallm.rollout.settings import EpisodeSettings
from parallm.trainer.trainer import Pipeline
from parallm.types import POLICY, Completion, GenerationRequest, Message, Problem, SamplingParams, Split

Bounds = tuple[float, float]


class Slow:
    """Asks for more after every turn, and scores at last, as other computers would do it."""

    weights: Mapping[str, float] = {"long": 1.0}

    def __init__(self, reply_seconds: Bounds, score_seconds: float, *, is_async: bool) -> None:
        self._reply_seconds = reply_seconds
        self._score_seconds = score_seconds
        self._is_async = is_async

    def problems(self, split: Split) -> Sequence[Problem]:
        return []

    async def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        await asyncio.sleep(drawn(turns[-1].content, self._reply_seconds))
        return [Message(role="user", content="more")]

    def score(self, problem: Problem, turns: Sequence[Message]) -> RewardParts | Awaitable[RewardParts]:
        if self._is_async:
            return self._scored(turns)
        time.sleep(self._score_seconds)
        return {"long": float(len(turns))}

    async def _scored(self, turns: Sequence[Message]) -> RewardParts:
        await asyncio.sleep(self._score_seconds)
        return {"long": float(len(turns))}


class LockStep(RolloutRunner):
    """Turn by turn: the longest completion and the slowest reply of a turn hold all others, and scores come last."""

    async def run_episodes(
        self,
        problems: Sequence[Problem],
        requests: Sequence[GenerationRequest],
        progress: Callable[[int], None] = lambda num_scored: None,
    ) -> list[list[ScoredEpisode]]:
        first = [self._for_turn(*pair, turn=0) for pair in zip(problems, requests, strict=True)]
        ended = sorted([pair async for pair in self._completions(problems, first)], key=lambda pair: pair[0])
        opened = [self._open(*pair) for pair in zip(problems, [one.n for one in requests], strict=True)]
        episodes = [self._begin(problems[at], requests[at], completion, opened[at]) for at, completion in ended]
        for turn in range(1, self._max_turns):
            await asyncio.gather(*[self._reply(one) for one in episodes if not one.is_over])
            active = [one for one in episodes if not one.is_over]
            later = [self._next_request(one, turn) for one in active]
            if later:
                async for at, completion in self._completions([one.problem for one in active], later):
                    self._append(active[at], completion)
        scored = await asyncio.gather(*map(self._score, episodes))
        groups = [[one for one in scored if one.episode.request is request] for request in requests]
        return [sorted(group, key=lambda one: one.episode.index) for group in groups]


class Steps:
    """The collector of a pipeline that trains on nothing: a step is `size` of the episodes."""

    def __init__(
        self, runner: RolloutRunner, problems: Sequence[Problem], requests: Sequence[GenerationRequest], size: int
    ) -> None:
        self.groups: dict[int, list[list[ScoredEpisode]]] = {}
        self._runner = runner
        self._problems = problems
        self._requests = requests
        self._size = size

    async def collect(self, step: int, model: str) -> RolloutBatch:
        part = slice(step * self._size, (step + 1) * self._size)
        self.groups[step] = await self._runner.run_episodes(self._problems[part], self._requests[part])
        return RolloutBatch(first=(), sampled=(), seconds=0.0)

    async def collect_all(self, limit: int) -> None:
        """Collect each step as a trainer with `max_off_policy_steps=limit` does, whose updates take no time."""
        num_steps = len(self._requests) // self._size
        pipeline = Pipeline(cast(Collector, self), lambda: 0, policy=POLICY, limit=limit, num_steps=num_steps)
        for step in range(num_steps):
            await pipeline.take(step)


WAYS: Mapping[str, tuple[type[RolloutRunner], int]] = {
    "ahead": (RolloutRunner, 1),
    "steps": (RolloutRunner, 0),
    "lock step": (LockStep, 0),
    "lock step ahead": (LockStep, 1),
}
"""How episodes go, and `trainer.max_off_policy_steps`."""


async def main(
    *,
    episodes: int,
    at_once: int,
    turns: int = 8,
    lengths: Bounds,
    reply_seconds: Bounds,
    score_seconds: float = 0.0,
    is_async: bool = True,
    ways: Sequence[str] = tuple(WAYS),
) -> dict[str, float]:
    """Seconds of each of `ways`, for steps of `at_once` episodes. Raises ValueError if two sample different tokens."""
    seconds, sampled = {}, set()
    settings = EpisodeSettings(max_turns=turns, max_tokens=turns * (int(lengths[1]) + 16), score_seconds=60)
    environment, problems = Slow(reply_seconds, score_seconds, is_async=is_async), load_problems(None, episodes)
    # random weights repeat themselves more than real text
    async with open_workbench(shape="tiny", speculation=SpeculationSettings(method="none")) as bench:
        await bench.engine.generate_all(bench.requests("warm-up", None, 8, SamplingParams(max_tokens=32), model=POLICY))
        sampling = SamplingParams(max_tokens=settings.max_tokens, seed=0, ignore_eos=True)
        requests = bench.requests("episodes", None, episodes, sampling, n=1, model=POLICY)
        for way in ways:
            make, limit = WAYS[way]
            runner = make(cut(bench.engine.completions, lengths), bench.model.tokenizer, environment, settings)
            steps = Steps(runner, problems, requests, at_once)
            await bench.engine.reset_caches()
            began = time.perf_counter()
            await steps.collect_all(limit)
            seconds[way] = time.perf_counter() - began
            scored = [one for _, groups in sorted(steps.groups.items()) for group in groups for one in group]
            sampled.add(tuple((one.score.reward, *one.episode.tokens) for one in scored))
    if len(sampled) > 1 or any(reward != 2 * turns - 1 for reward, *_ in next(iter(sampled))):
        raise ValueError("the ways sample different tokens, or an episode has ended early")
    return seconds


def cut(generate: Generate, lengths: Bounds) -> Generate:
    """Completions that end after a number of tokens drawn for each request, as if they ended by themselves."""

    async def generate_cut(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        shorter = [
            replace(one, sampling=replace(one.sampling, max_tokens=round(drawn(one.request_id, lengths))))
            for one in requests
        ]
        async with aclosing(generate(shorter)) as completions:
            async for index, completion in completions:
                yield index, replace(completion, finish_reason="stop")

    return generate_cut


def drawn(key: str, bounds: Bounds) -> float:
    low, high = map(math.log, bounds)
    return math.exp(Random(key).uniform(low, high))
