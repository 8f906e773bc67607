"""Sampling in shares: who asks for what, and what all get."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from parallm.distributed.collector import SharedCollector
from parallm.rollout.collector import Collector
from parallm.rollout.problems import ProblemStream
from parallm.rollout.settings import RolloutSettings
from parallm.types import GenerationRequest, Message
from tests.distributed.conftest import Together
from tests.rollout.answers import one_by_one
from tests.rollout.conftest import Hardness, Letters, Recorder, problems_with

RANKS = 3


class CountedLetters(Letters):
    num_prompts = 0

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.num_prompts += 1
        return super().encode_chat(messages)


class Worker:
    """A collector with an engine and a tokenizer of its own."""

    def __init__(
        self, problems: int, rank: int | None = None, together: Together | None = None, *, refill_rounds: int = 0
    ) -> None:
        self.engine, self.tokenizer = Recorder(), CountedLetters()
        every = problems_with(*["2"] * 4)
        settings = RolloutSettings(group_size=4, max_tokens=9, problems_per_step=problems, refill_rounds=refill_rounds)
        parts: list[Any] = [one_by_one(self.engine.generate_all), self.tokenizer, Hardness(every)]
        parts += [ProblemStream(every, 1), settings, 1]
        self.collector: Collector = (
            Collector(*parts) if together is None else SharedCollector(*parts, exchange=together.rank(rank or 0))
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


@pytest.mark.parametrize("refill_rounds", [0, 3])
def test_a_worker_samples_ahead_while_it_waits_for_stragglers_unless_they_decide_what_is_drawn(
    refill_rounds: int,
) -> None:
    """Two of three have sampled step 0; with a step ahead they go on with step 1. Then the last one comes."""
    together = Together(RANKS, exact=False)
    workers = [Worker(RANKS, rank, together, refill_rounds=refill_rounds) for rank in range(RANKS)]

    def begin(worker: Worker) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(worker.collector.collect(step, "policy")) for step in (0, 1)]

    async def collect() -> list[list[Any]]:
        begun = [begin(worker) for worker in workers[:-1]]
        await asyncio.sleep(0.01)
        ahead = "step-1-0-policy" in workers[0].asked()
        assert ahead is (refill_rounds == 0)
        begun.append(begin(workers[-1]))
        return [list(await asyncio.gather(*tasks)) for tasks in begun]

    first, *others = asyncio.run(collect())
    assert [[batch.sampled for batch in batches] for batches in others] == [[one.sampled for one in first]] * 2
