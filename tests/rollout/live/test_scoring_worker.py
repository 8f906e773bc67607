"""Scoring functions that block, loop or never end: they cost themselves only."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Iterator

import pytest

from parallm.rollout.environment_calls import CallResult
from parallm.rollout.live import scoring_dispatcher
from parallm.rollout.live.scoring_dispatcher import MAX_LOOPS, MAX_PENDING, MAX_THREADS, ScoringWorker
from parallm.rollout.live.scoring_functions import ScoringInput
from tests.rollout.live.conftest import until

ANSWERED = ScoringInput(prompt="p", text="t", finish_reason="stop", metadata={})
SECONDS = 10.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds up who waits for it, outside of Python as far as Python can tell, until the test is over."""
    opened = threading.Event()
    yield opened
    opened.set()


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def kinds(outcomes: list[CallResult]) -> list[str]:
    return [one.fault.kind if one.fault else str(one.value) for one in outcomes]


def test_several_calls_run_at_a_time_and_no_more_than_so_many(gate: threading.Event) -> None:
    def wait(_: ScoringInput) -> float:
        gate.wait(SECONDS)
        return 1.0

    async def main() -> None:
        one = ScoringWorker(wait, SECONDS)
        calls = [asyncio.create_task(one.call(ANSWERED)) for _ in range(3 * MAX_THREADS)]
        await until(lambda: num_threads("scoring") == MAX_THREADS)
        gate.set()
        assert kinds(await asyncio.gather(*calls)) == ["1.0"] * (3 * MAX_THREADS)

    asyncio.run(main())


def test_a_call_that_hangs_keeps_its_place_until_it_ends(gate: threading.Event) -> None:
    def hang(_: ScoringInput) -> float:
        while not gate.is_set():  # and swallows what should end it
            try:
                gate.wait(SECONDS)
            except BaseException:  # noqa: BLE001
                continue
        return 1.0

    async def main() -> None:
        one = ScoringWorker(hang, 0.05)
        late = await asyncio.gather(*(one.call(ANSWERED) for _ in range(MAX_THREADS)))
        assert kinds(late) == ["timed_out"] * MAX_THREADS
        behind = [asyncio.create_task(one.call(ANSWERED)) for _ in range(MAX_THREADS)]
        await asyncio.sleep(0)
        assert num_threads("scoring") == MAX_THREADS
        gate.set()
        assert kinds(await asyncio.gather(*behind)) == ["1.0"] * MAX_THREADS

    asyncio.run(main())


def test_one_call_more_than_may_wait_is_refused_unless_it_is_patient(gate: threading.Event) -> None:
    def wait(_: ScoringInput) -> float:
        gate.wait(SECONDS)
        return 1.0

    async def main() -> None:
        one = ScoringWorker(wait, SECONDS)
        calls = [asyncio.create_task(one.call(ANSWERED)) for _ in range(MAX_PENDING)]
        await asyncio.sleep(0)
        assert kinds([await one.call(ANSWERED)]) == ["behind"]
        patient = asyncio.create_task(one.call(ANSWERED, is_patient=True))
        gate.set()
        assert kinds([await patient]) == ["1.0"]
        await asyncio.gather(*calls)
        assert kinds([await one.call(ANSWERED)]) == ["1.0"]

    asyncio.run(main())


def test_an_endless_loop_is_ended() -> None:
    def loop(_: ScoringInput) -> float:
        while True:
            pass

    async def main() -> None:
        one = ScoringWorker(loop, 0.05)
        for _ in range(2):
            assert kinds([await one.call(ANSWERED)]) == ["timed_out"]
        await until(lambda: num_threads("scoring") == 0)

    asyncio.run(main())


def test_what_blocks_inside_an_awaitable_delays_no_other_loop_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_dispatcher, "GRACE_SECONDS", 0.1)

    async def block(_: ScoringInput) -> float:
        while True:
            pass

    async def good(_: ScoringInput) -> float:
        await asyncio.sleep(0)
        return 2.0

    async def main() -> None:
        bad, other = ScoringWorker(block, 0.2), ScoringWorker(good, SECONDS)
        blocked = asyncio.create_task(bad.call(ANSWERED))
        began = time.monotonic()
        assert kinds([await other.call(ANSWERED)]) == ["2.0"]
        assert time.monotonic() - began < SECONDS / 2
        assert kinds([await blocked]) == ["timed_out"]
        assert kinds([await bad.call(ANSWERED)]) == ["timed_out"]
        bad.close()
        other.close()
        await until(lambda: num_threads("scoring-loop") == 0)

    asyncio.run(main())


def test_loops_that_nothing_can_free_are_bounded(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    async def block(_: ScoringInput) -> float:
        while not gate.is_set():
            try:
                gate.wait(SECONDS)
            except BaseException:  # noqa: BLE001
                continue
        return 1.0

    async def main() -> None:
        monkeypatch.setattr(scoring_dispatcher, "GRACE_SECONDS", 0.05)
        one = ScoringWorker(block, 0.05)
        found = [await one.call(ANSWERED) for _ in range(MAX_LOOPS + 1)]
        assert kinds(found) == ["timed_out"] * MAX_LOOPS + ["behind"]
        assert num_threads("scoring-loop") == MAX_LOOPS
        gate.set()
        await until(lambda: not one._loops[0].is_blocked)
        assert kinds([await one.call(ANSWERED)]) == ["1.0"]
        one.close()
        await until(lambda: num_threads("scoring-loop") == 0)

    asyncio.run(main())


def test_awaitables_of_one_function_wait_side_by_side_on_one_loop() -> None:
    loops: set[int] = set()
    num_waiting = 0

    async def meet(_: ScoringInput) -> float:
        nonlocal num_waiting
        loops.add(id(asyncio.get_running_loop()))
        num_waiting += 1
        await until(lambda: num_waiting == 20)
        return 1.0

    async def main() -> None:
        one = ScoringWorker(meet, SECONDS)
        calls: list[Awaitable[CallResult]] = [one.call(ANSWERED) for _ in range(20)]
        assert kinds(list(await asyncio.gather(*calls))) == ["1.0"] * 20
        assert len(loops) == 1
        one.close()

    asyncio.run(main())
