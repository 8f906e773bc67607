"""What is collected when, and how old it may be: a real collector over an engine that answers when it is told to."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from parallm.errors import EngineStopped
from parallm.rollout.collector import Collector
from parallm.rollout.problems import ProblemStream
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.trainer import Pipeline
from parallm.types import Completion, GenerationRequest, Message, Problem, WeightSpan
from tests.rollout.answers import one_by_one


class Letters:
    """One token per letter of the messages."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)


class Halves:
    """Every second completion is rewarded, whatever it says."""

    weights: Mapping[str, float] = {"odd": 1.0}

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"odd": float(int(text) % 2)}


@dataclass(slots=True)
class Model:
    """The learner's version, and the engine: a request is answered with the version of the moment it was asked."""

    version: int = 0
    asked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_blocked: Callable[[str], bool] = lambda _: False
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        version = self.version
        self.asked += [request.request_id for request in requests]
        await asyncio.sleep(0)
        if any(self.is_blocked(request.request_id) for request in requests):
            await self.freed.wait()
        return [[completion(request, index, version) for index in range(request.n)] for request in requests]


def completion(request: GenerationRequest, index: int, version: int) -> Completion:
    return Completion(
        request_id=request.request_id,
        index=index,
        tokens=(7, 8),
        logprobs=(-0.5, -0.25),
        top_logprobs=((), ()),
        text=str(index),
        finish_reason="stop",
        weight_versions=(WeightSpan(version=version, start=0, end=2),),
    )


def make(limit: int, num_steps: int = 10) -> tuple[Pipeline, Model, Collector]:
    problems = [
        Problem(problem_id=f"p{place}", messages=(Message(role="user", content="x"),), answer="") for place in range(9)
    ]
    model, settings = Model(), RolloutSettings(problems_per_step=2, group_size=2, max_tokens=9)
    # the fakes have just the methods that the collector uses
    collector = Collector(one_by_one(model.generate_all), Letters(), Halves(), ProblemStream(problems, 0), settings, 1)  # type: ignore[arg-type]
    pipeline = Pipeline(collector, lambda: model.version, policy="policy", limit=limit, num_steps=num_steps)
    return pipeline, model, collector


def steps_of(names: Sequence[str]) -> list[int]:
    return sorted({int(name.split("-")[1]) for name in names})


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def commit() -> None:
    """Let everything run that can run."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_without_a_limit_above_zero_nothing_is_sampled_ahead() -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=0)
        for step in range(3):
            batch = await pipeline.take(step)
            await commit()
            assert steps_of(model.asked) == list(range(step + 1))
            assert (batch.off_policy.lag_mean, batch.off_policy.lag_max, batch.off_policy.dropped) == (0, 0, 0)
            model.version += 1

    run(test)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_coming_steps_are_sampled_as_far_ahead_as_the_limit_allows(limit: int) -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=limit)
        for step in range(6):
            batch = await pipeline.take(step)
            await commit()
            assert steps_of(model.asked) == list(range(step + limit + 1))
            assert batch.off_policy.lag_max == batch.off_policy.lag_mean == min(step, limit)
            assert batch.off_policy.dropped == 0
            model.version += 1
        await pipeline.close()

    run(test)


def test_nothing_is_sampled_beyond_the_last_step() -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=4, num_steps=3)
        await pipeline.take(0)
        await commit()
        assert steps_of(model.asked) == [0, 1, 2]
        await pipeline.close()

    run(test)


def test_a_step_waits_for_its_own_groups_though_later_ones_are_done() -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=1)
        model.is_blocked = lambda name: name.startswith("step-0-")
        taking = asyncio.create_task(pipeline.take(0))
        await commit()
        assert steps_of(model.asked) == [0, 1]
        assert not taking.done()
        model.freed.set()
        await taking
        await pipeline.close()

    run(test)


def test_requests_of_a_step_are_those_of_a_run_that_samples_in_turns() -> None:
    async def requests(limit: int) -> set[tuple[str, int | None, tuple[int, ...]]]:
        pipeline, model, collector = make(limit=limit, num_steps=4)
        seen: list[GenerationRequest] = []

        async def generate_all(asked: Sequence[GenerationRequest]) -> list[list[Completion]]:
            seen.extend(asked)
            return await model.generate_all(asked)

        collector._runner._generate = one_by_one(generate_all)
        for step in range(4):
            await pipeline.take(step)
        return {(one.request_id, one.sampling.seed, one.prompt_tokens) for one in seen}

    assert asyncio.run(requests(0)) == asyncio.run(requests(2))


def test_groups_beyond_the_limit_are_dropped_and_their_problems_sampled_anew() -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=1)
        await pipeline.take(0)
        await commit()  # the groups of step 1 are of version 0
        model.version = 2
        batch = await pipeline.take(1)
        assert (batch.off_policy.dropped, batch.off_policy.lag_max) == (2, 0)
        asked = [name for name in model.asked if name.startswith("step-1-")]
        assert asked == [f"step-1-{place}-latest" for place in range(4)]
        versions = {
            span.version
            for group in batch.rollout_batch.sampled
            for one in group.trajectories
            for span in one.weight_versions
        }
        assert versions == {2}
        assert batch.rollout_batch.first == batch.rollout_batch.sampled
        await pipeline.close()

    run(test)


def test_groups_of_a_version_that_the_learner_has_left_are_too_old() -> None:
    async def test() -> None:
        pipeline, model, _ = make(limit=1)
        model.version = 5
        await pipeline.take(0)
        await commit()
        model.version = 4
        assert (await pipeline.take(1)).off_policy.dropped == 2
        await pipeline.close()

    run(test)


def test_what_collecting_a_step_raises_comes_when_the_step_is_due() -> None:
    async def test() -> None:
        pipeline, model, collector = make(limit=1)
        generate_all = model.generate_all

        async def fail_in_step_1(requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
            if requests[0].request_id.startswith("step-1-"):
                raise EngineStopped("gone")
            return await generate_all(requests)

        collector._runner._generate = one_by_one(fail_in_step_1)
        await pipeline.take(0)
        await commit()
        with pytest.raises(EngineStopped, match="gone"):
            await pipeline.take(1)
        await pipeline.close()

    run(test)


def test_closing_cancels_what_runs_and_gives_its_problems_back() -> None:
    async def test() -> None:
        pipeline, model, collector = make(limit=2)
        batch = await pipeline.take(0)
        model.is_blocked = lambda _: True
        await commit()
        collector.problem_cursor.commit(0)
        await pipeline.close()
        await commit()
        state = collector.problem_cursor.state()
        assert (state["cursor"], state["again"]) == (6, [2, 3, 4, 5])
        assert len(batch.rollout_batch.sampled) == 2
        async with asyncio.timeout(5):  # the thread of the last call may not have ended yet
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.001)

    run(test)
