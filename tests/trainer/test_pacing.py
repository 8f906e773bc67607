import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from parallm.errors import CheckpointError, Unavailable
from parallm.reports import EvaluationReport
from parallm.trainer.pacing import MAX_REQUESTS, Pacing


class Loop:
    """Counts steps; `save` is what a checkpoint does."""

    def __init__(self, num_steps: int, save: Callable[[], Path] = lambda: Path("step")) -> None:
        self.num_steps = num_steps
        self.done = 0
        self.is_stopped = False
        self.saved_at: list[int] = []
        self.num_waits = 0
        self.are_groups_there = True
        self._make = save
        self.evaluated_at: list[int] = []
        self.pacing = Pacing(self._save, self._evaluate)

    async def run(self) -> None:
        try:
            while not self._is_over():
                await self.pacing.before_step(self._is_over, self._on_wait, lambda: self.are_groups_there)
                if not self._is_over():
                    await asyncio.sleep(0.001)
                    self.done += 1
        finally:
            self.pacing.end()

    def _is_over(self) -> bool:
        return self.is_stopped or self.pacing.stopping.is_set() or self.done >= self.num_steps

    def _on_wait(self) -> None:
        self.num_waits += 1

    async def _evaluate(self) -> EvaluationReport:
        self.evaluated_at.append(self.done)
        return EvaluationReport(step=self.done, version=self.done)

    async def _save(self) -> Path:
        self.saved_at.append(self.done)
        return self._make()


def run(work: Callable[[Loop, asyncio.Task[None]], Awaitable[None]], loop: Loop, *, is_paused: bool = False) -> None:
    async def main() -> None:
        if is_paused:
            loop.pacing.pause()
        task = asyncio.create_task(loop.run())
        await asyncio.wait_for(work(loop, task), 10)
        await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_a_paused_loop_waits_takes_single_steps_and_goes_on() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.02)
        assert (loop.done, loop.pacing.is_paused) == (0, True)
        await loop.pacing.step()
        assert loop.done == 1
        await asyncio.gather(loop.pacing.step(), loop.pacing.step())
        await asyncio.sleep(0.02)
        assert (loop.done, loop.pacing.is_paused) == (3, True)
        loop.pacing.resume()
        await task
        assert loop.done == 8

    run(work, Loop(8), is_paused=True)


def test_a_pause_is_under_way_until_the_step_at_work_has_ended() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        await loop.pacing.step()  # the next one has begun by now
        found = [loop.pacing.is_pausing]
        loop.pacing.pause()
        found.append(loop.pacing.is_pausing)
        while not loop.num_waits:
            await asyncio.sleep(0)
        assert [*found, loop.pacing.is_pausing] == [False, True, False]
        loop.pacing.resume()

    run(work, Loop(4))


def test_a_step_that_is_asked_for_while_one_ends_is_a_step_of_its_own() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        await loop.pacing.step()
        loop.pacing.pause()
        begun = loop.done + 1  # the one at work
        await loop.pacing.step()
        assert loop.done == begun + 1
        loop.pacing.resume()

    run(work, Loop(50))


def test_a_checkpoint_is_made_between_steps_paused_or_not_and_once_for_all_who_ask() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        folders = await asyncio.gather(loop.pacing.checkpoint(), loop.pacing.checkpoint())
        assert set(folders) == {Path("step")}
        assert loop.saved_at == [1]
        loop.pacing.pause()
        await loop.pacing.checkpoint()
        await loop.pacing.checkpoint()
        assert len(loop.saved_at) == 3
        assert loop.saved_at[1] == loop.saved_at[2] == loop.done
        loop.is_stopped = True
        loop.pacing.wake()

    run(work, Loop(1000))


def test_an_evaluation_comes_between_steps_and_once_for_all_who_ask() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        reports = await asyncio.gather(loop.pacing.evaluate(), loop.pacing.evaluate())
        assert [report.step for report in reports] == loop.evaluated_at * 2 == [loop.done] * 2
        loop.pacing.pause()
        assert (await loop.pacing.evaluate()).step == loop.done
        assert len(loop.evaluated_at) == 2
        loop.pacing.stop()

    run(work, Loop(1000))


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_run_that_a_client_finishes_serves_on_unless_a_signal_comes(is_paused: bool) -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        loop.pacing.finish()
        assert loop.pacing.serves_on
        await loop.pacing.ended()
        assert loop.done <= 1
        with pytest.raises(Unavailable, match="training has ended"):
            loop.pacing.finish()
        loop.pacing.stop()
        assert not loop.pacing.serves_on

    run(work, Loop(1000), is_paused=is_paused)


def test_a_client_does_not_keep_a_run_that_a_signal_has_stopped() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        loop.pacing.stop()
        loop.pacing.finish()
        assert not loop.pacing.serves_on

    run(work, Loop(1000))


def test_an_error_of_a_save_belongs_to_who_asked_and_training_goes_on() -> None:
    def fail() -> Path:
        raise CheckpointError("the disk is full")

    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        with pytest.raises(CheckpointError, match="disk is full"):
            await loop.pacing.checkpoint()
        await task
        assert loop.done == 20

    run(work, Loop(20, fail))


def test_when_training_ends_nobody_waits_any_more() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        waiting = asyncio.gather(loop.pacing.step(), loop.pacing.step(), return_exceptions=True)
        loop.is_stopped = True
        loop.pacing.wake()
        assert [type(error) for error in await waiting] == [Unavailable, Unavailable]
        await task
        for ask in (loop.pacing.step, loop.pacing.checkpoint, loop.pacing.evaluate):
            with pytest.raises(Unavailable, match="training has ended"):
                await ask()
        with pytest.raises(Unavailable):
            loop.pacing.pause()

    run(work, Loop(5), is_paused=False)


def test_stopping_ends_a_paused_loop() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.01)
        loop.is_stopped = True
        loop.pacing.wake()
        await task
        assert (loop.done, loop.num_waits) == (0, 1)

    run(work, Loop(5), is_paused=True)


def test_work_that_is_asked_for_is_done_between_steps_in_the_order_of_the_calls_paused_or_not() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        done: list[tuple[str, int]] = []

        async def note(name: str) -> str:
            done.append((name, loop.done))
            await asyncio.sleep(0.002)
            assert loop.done == done[-1][1], "no step runs meanwhile"
            return name

        running = [loop.pacing.between_steps(partial(note, name)) for name in ("a", "b")]
        assert await asyncio.gather(*running) == ["a", "b"]
        loop.pacing.pause()
        assert await loop.pacing.between_steps(partial(note, "c")) == "c"
        assert [name for name, _ in done] == ["a", "b", "c"]
        loop.pacing.resume()

    run(work, Loop(5))


def test_work_that_fails_is_told_to_those_who_have_asked_and_costs_the_run_nothing() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        async def fail() -> None:
            raise KeyError("a bug")

        with pytest.raises(KeyError, match="a bug"):
            await loop.pacing.between_steps(fail)
        await task
        assert loop.done == 5

    run(work, Loop(5))


def test_work_is_bounded_and_refused_when_no_step_will_come() -> None:
    async def nothing() -> None:
        pass

    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        waiting = [asyncio.create_task(loop.pacing.between_steps(nothing)) for _ in range(MAX_REQUESTS)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="16 updates wait"):
            await loop.pacing.between_steps(nothing)
        loop.is_stopped = True
        await task
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(one is None or isinstance(one, Unavailable) for one in found)
        with pytest.raises(Unavailable, match="training has ended"):
            await loop.pacing.between_steps(nothing)

    run(work, Loop(5))


def test_callers_of_a_step_that_cannot_begin_are_answered_at_once_and_begin_none_later() -> None:
    async def work(loop: Loop, task: asyncio.Task[None]) -> None:
        for is_paused in (False, True):
            if is_paused:
                loop.pacing.pause()
            asked = [asyncio.create_task(loop.pacing.step()) for _ in range(2)]
            while not loop.pacing.awaits_step:
                await asyncio.sleep(0)
            loop.pacing.refuse_steps("nothing was collected")
            for step in asked:
                with pytest.raises(Unavailable, match="nothing was collected"):
                    await step
            assert not loop.pacing.awaits_step
        loop.are_groups_there = True
        loop.pacing.wake()
        await asyncio.sleep(0.02)
        assert loop.done == 0  # it is paused, and no step is asked for
        loop.pacing.resume()
        await task

    loop = Loop(2)
    loop.are_groups_there = False
    run(work, loop)
