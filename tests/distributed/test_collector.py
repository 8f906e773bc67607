"""Sampling in shares: who asks for what, and what all get."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from parallm.distributed.collector import SharedCollector
from parallm.rollout.collector import Collector
from parallm.rollout.problems import ProblemStream
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.trainer import Pipeline
from parallm.types import Completion, GenerationRequest, Message
from tests.distributed.conftest import Together
from tests.rollout.answers import one_by_one
from tests.rollout.conftest import Hardness, Letters, Recorder, problems_with

RANKS = 3
NUM_STEPS, ROLLED_BACK = 9, (1, 3, 6)


class CountedLetters(Letters):
    num_prompts = 0

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.num_prompts += 1
        return super().encode_chat(messages)


class SlowRecorder(Recorder):
    """Answers at once or after 10 ms, and with one text for all when it is asked anew, as after a roll-back."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        await asyncio.sleep(self._chance.choice((0.0, 0.01)))
        before = {request.request_id for round in self.rounds for request in round}
        every = await super().generate_all(requests)
        return [
            [
                replace(completion, text="0") if request.request_id in before else completion
                for completion in completions
            ]
            for request, completions in zip(requests, every, strict=True)
        ]


class Worker:
    """A collector with an engine and a tokenizer of its own."""

    def __init__(
        self,
        problems: int,
        rank: int | None = None,
        together: Together | None = None,
        *,
        ahead: int = 0,
        answers: str = "2222",
        chance: random.Random | None = None,
        **refills: Any,
    ) -> None:
        """`answers`: see `Hardness`. With `chance` the engine takes a while."""
        self.engine, self.tokenizer = SlowRecorder(chance) if chance else Recorder(), CountedLetters()
        every = problems_with(*answers)
        settings = RolloutSettings(group_size=4, max_tokens=9, problems_per_step=problems, **refills)
        parts: list[Any] = [one_by_one(self.engine.generate_all), self.tokenizer, Hardness(every)]
        parts += [ProblemStream(every, 1), settings, 1]
        self.collector: Collector = (
            Collector(*parts)
            if together is None
            else SharedCollector(*parts, exchange=together.rank(rank or 0), ahead=ahead)
        )

    def asked(self) -> dict[str, GenerationRequest]:
        return {request.request_id: request for round in self.engine.rounds for request in round}


@pytest.mark.parametrize("problems", [2, 4])
def test_each_worker_asks_for_its_share_as_one_worker_would_and_gets_all_groups(problems: int) -> None:
    alone, together = Worker(problems), Together(RANKS, exact=False)
    workers = [Worker(problems, rank, together) for rank in range(RANKS)]
    expected = asyncio.run(alone.collector.collect(5, "policy"))

    async def collect() -> list[Any]:
        return await asyncio.gather(*(worker.collector.collect(5, "policy") for worker in workers))

    batches = asyncio.run(collect())
    assert [batch.first for batch in batches] == [expected.first] * RANKS
    assert {name: one for worker in workers for name, one in worker.asked().items()} == alone.asked()
    shares = [len(range(rank, problems, RANKS)) for rank in range(RANKS)]
    assert [len(worker.asked()) for worker in workers] == shares
    assert [worker.tokenizer.num_prompts for worker in workers] == shares


def test_a_worker_that_waits_for_the_groups_of_others_samples_the_next_step() -> None:
    together = Together(RANKS, exact=False)
    workers = [Worker(RANKS, rank, together, ahead=1) for rank in range(RANKS)]

    def begin(worker: Worker) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(worker.collector.collect(step, "policy")) for step in (0, 1)]

    async def collect() -> list[list[Any]]:
        begun = [begin(worker) for worker in workers[:-1]]
        await asyncio.sleep(0.01)
        assert "step-1-0-policy" in workers[0].asked()
        begun.append(begin(workers[-1]))
        return [list(await asyncio.gather(*tasks)) for tasks in begun]

    first, *others = asyncio.run(collect())
    assert [[batch.sampled for batch in batches] for batches in others] == [[one.sampled for one in first]] * 2


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_workers_draw_the_same_problems_whatever_their_clocks_say(ahead: int, seed: int) -> None:
    """Half of the problems have no signal, so steps refill while others begin, at times of each worker's own."""
    together, chance = Together(RANKS, exact=False), random.Random(seed)
    workers = [
        Worker(2, rank, together, answers="0204" * 5, refill_rounds=3, refill_below=1.0, ahead=ahead, chance=chance)
        for rank in range(RANKS)
    ]

    async def train(worker: Worker) -> list[Any]:
        pipeline = Pipeline(worker.collector, lambda: 3, policy="policy", limit=ahead, num_steps=NUM_STEPS)
        found = []
        for step in range(NUM_STEPS):
            found.append((await pipeline.take(step)).rollout_batch.sampled)
            worker.collector.problem_cursor.commit(step)
            await asyncio.sleep(chance.choice((0.0, 0.02)))
            if step in ROLLED_BACK:
                await asyncio.sleep(chance.choice((0.0, 0.02)))
                await pipeline.close()
        await pipeline.close()
        return found

    async def train_all() -> list[Any]:
        return await asyncio.gather(*map(train, workers))

    first, *others = asyncio.run(train_all())
    assert others == [first] * (RANKS - 1)
    assert max(map(len, first)) > 2, "some step refills"
    state = workers[0].collector.problem_cursor.state()
    assert sum(map(len, first)) == state["cursor"] - len(state["again"]), "each problem is trained on once"
    following = [worker.collector.problem_cursor.take(20) for worker in workers]
    assert following == following[:1] * RANKS
