"""Borders of steps of several workers: one asks, all obey, and different versions stop the run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.distributed.channel import Channel
from parallm.distributed.pacing import SharedPacing
from parallm.errors import CheckpointError, EnvironmentFailed, Unavailable, WorkersDiffer
from parallm.reports import EvaluationReport

Channels = Callable[..., list[Channel]]


class Worker:
    """A loop with one step after the other and nothing in them."""

    def __init__(self, channel: Channel, num_steps: int = 100_000, digests: dict[int, str] | None = None) -> None:
        self.rank = channel.rank
        self.done = 0
        self.saves = 0
        self.error: Exception | None = None
        self.evaluated_at: list[int] = []
        self.is_hopeless = False
        self._digests = digests or {}
        self._num_steps = num_steps
        self.pacing = SharedPacing(
            self._save,
            self._evaluate,
            exchange=channel,
            version=lambda: (self.done, self._digests.get(self.done, "")),
        )

    async def run(self) -> int:
        try:
            while not self._is_over():
                await self.pacing.before_step(self._is_over, lambda: None)
                if not self._is_over():
                    await asyncio.sleep(0.002)
                    self.done += 1
            await self.pacing.after_last_step()
        finally:
            self.pacing.end()
        return self.done

    def _is_over(self) -> bool:
        return self.pacing.stopping.is_set() or self.done >= self._num_steps

    async def _evaluate(self) -> EvaluationReport:
        self.evaluated_at.append(self.done)
        if self.is_hopeless:
            raise EnvironmentFailed("nothing could be scored")
        return EvaluationReport(step=self.done, version=self.done)

    async def _save(self) -> Path:
        self.saves += 1
        if self.error is not None:
            raise self.error
        return Path(f"rank_{self.rank}/step_{self.done}")


@pytest.mark.parametrize("serves_on", [False, True])
@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_asked_of_one_worker_ends_all_after_the_same_step(
    asked: int, serves_on: bool, channels: Channels
) -> None:
    workers = [Worker(channel) for channel in channels(3)]

    async def main() -> list[int]:
        runs = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.sleep(0.05)
        pacing = workers[asked].pacing
        if serves_on:
            pacing.finish()
            await pacing.ended()
        else:
            pacing.stop()
        return await asyncio.gather(*runs)

    done = asyncio.run(main())
    assert [worker.pacing.serves_on for worker in workers] == [serves_on] * 3
    assert len(set(done)) == 1
    assert done[0] > 0


def test_a_pause_a_step_and_a_resume_hold_for_all(channels: Channels) -> None:
    first, second = (Worker(channel) for channel in channels(2))

    async def main() -> None:
        runs = [asyncio.create_task(worker.run()) for worker in (first, second)]
        await asyncio.sleep(0.05)
        second.pacing.pause()
        assert is_paused(second)
        await asyncio.sleep(0.5)
        assert is_paused(first)
        assert first.done == second.done > 0
        before = first.done
        await asyncio.wait_for(asyncio.gather(first.pacing.step(), second.pacing.step()), 5)
        await asyncio.sleep(0.3)
        assert (first.done, second.done) == (before + 2, before + 2)
        first.pacing.resume()
        await asyncio.sleep(0.5)
        assert first.done > before + 2
        assert not is_paused(second)
        first.pacing.stop()
        await asyncio.gather(*runs)

    asyncio.run(main())


def test_a_save_asked_of_any_worker_is_made_by_the_first(channels: Channels) -> None:
    first, second = (Worker(channel) for channel in channels(2))

    async def main() -> None:
        runs = [asyncio.create_task(worker.run()) for worker in (first, second)]
        folders = await asyncio.wait_for(asyncio.gather(first.pacing.checkpoint(), second.pacing.checkpoint()), 5)
        assert {folder.parent.name for folder in folders} == {"rank_0"}
        first.error = CheckpointError("the disk is full")
        with pytest.raises(CheckpointError, match="the disk is full"):
            await asyncio.wait_for(second.pacing.checkpoint(), 5)
        with pytest.raises(Unavailable, match="rank 0"):
            await second.pacing.between_steps(first.pacing.checkpoint)
        second.pacing.stop()
        await asyncio.gather(*runs)
        with pytest.raises(Unavailable, match="training has ended"):
            await second.pacing.checkpoint()

    asyncio.run(main())


def test_an_evaluation_asked_of_any_worker_is_made_by_all(channels: Channels) -> None:
    first, second = (Worker(channel) for channel in channels(2))

    async def main() -> None:
        runs = [asyncio.create_task(worker.run()) for worker in (first, second)]
        report = await asyncio.wait_for(second.pacing.evaluate(), 5)
        first.is_hopeless = second.is_hopeless = True
        with pytest.raises(EnvironmentFailed):
            await asyncio.wait_for(first.pacing.evaluate(), 5)
        second.pacing.stop()
        await asyncio.gather(*runs)
        assert first.evaluated_at == second.evaluated_at
        assert (len(first.evaluated_at), first.evaluated_at[0]) == (2, report.step)
        with pytest.raises(Unavailable, match="training has ended"):
            await second.pacing.evaluate()

    asyncio.run(main())


def test_workers_whose_versions_differ_stop_with_ranks_and_digests(channels: Channels) -> None:
    made = channels(2)
    workers = [Worker(channel, 20, {7: f"digest{channel.rank}"}) for channel in made]
    flaws: list[str] = []
    for worker in workers:
        worker.pacing._on_difference = flaws.append

    async def main() -> list[int | BaseException]:
        return await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)

    first, second = asyncio.run(main())
    assert isinstance(first, WorkersDiffer)
    assert str(first) == str(second)
    assert "rank 0: 7 digest0, rank 1: 7 digest1" in str(first)
    assert [worker.done for worker in workers] == [7, 7]
    assert flaws == [str(first)] * 2


def test_versions_are_compared_after_the_last_step_too(channels: Channels) -> None:
    workers = [Worker(channel, 3, {3: f"digest{channel.rank}"}) for channel in channels(2)]

    async def main() -> None:
        await asyncio.gather(*(worker.run() for worker in workers))

    with pytest.raises(WorkersDiffer):
        asyncio.run(main())


def is_paused(worker: Worker) -> bool:
    return worker.pacing.is_paused
