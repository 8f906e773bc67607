import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from parallm.rollout.environment_calls import MAX_LINES, CallResult, EnvironmentCalls, _Work


def call_all(*functions: Callable[[], object], seconds: float = 5.0) -> list[CallResult]:
    """The results of calls that are asked for at one moment."""

    async def main() -> list[CallResult]:
        calls = EnvironmentCalls(seconds)
        return await asyncio.gather(*map(calls.call, functions))

    return asyncio.run(main())


def kinds(outcomes: list[CallResult]) -> list[object]:
    return [outcome.fault.kind if outcome.fault else outcome.value for outcome in outcomes]


def fail(error: BaseException) -> Callable[[], object]:
    def function() -> object:
        raise error

    return function


def spin() -> None:
    while True:
        pass


def test_calls_are_made_in_order_in_one_thread_that_is_not_the_event_loop() -> None:
    threads: list[int] = []

    def number() -> int:
        threads.append(threading.get_ident())
        return len(threads)

    outcomes = call_all(*[number] * 5)
    assert [outcome.value for outcome in outcomes] == [1, 2, 3, 4, 5]
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), StopIteration(), TimeoutError()]
)
def test_what_a_call_raises_is_a_fault_of_it_alone(error: BaseException) -> None:
    outcomes = call_all(lambda: 1, fail(error), lambda: 3)
    assert kinds(outcomes) == [1, "raised", 3]
    assert outcomes[1].fault is not None
    assert (outcomes[1].fault.kind, outcomes[1].fault.detail) == ("raised", repr(error))


async def awaited() -> None:
    raise ValueError("no number")


@pytest.mark.parametrize("function", [fail(ValueError("no number")), awaited], ids=["function", "awaitable"])
def test_a_fault_has_the_environments_part_of_the_traceback(function: Callable[[], object]) -> None:
    (outcome,) = call_all(function)
    assert outcome.fault is not None
    first, place, *_, last = outcome.fault.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert place.startswith(f'  File "{__file__}", line ')
    assert last == "ValueError: no number"


class Unprintable(ValueError):
    def __repr__(self) -> str:
        raise RuntimeError


def test_an_error_that_cannot_be_printed_is_a_fault_of_its_call_alone() -> None:
    outcomes = call_all(fail(Unprintable()), lambda: 2)
    assert kinds(outcomes) == ["raised", 2]
    assert outcomes[0].fault is not None
    assert outcomes[0].fault.detail == "Unprintable, whose repr raises"


def test_a_traceback_is_bounded() -> None:
    def dig() -> None:
        fill()

    def fill() -> None:
        dig()

    (outcome,) = call_all(dig)
    assert outcome.fault is not None
    assert len(outcome.fault.traceback.splitlines()) == MAX_LINES


def test_a_call_that_never_ends_is_a_fault_of_it_alone_and_its_thread_ends() -> None:
    before = threading.active_count()
    assert kinds(call_all(lambda: 1, spin, lambda: 3, spin, seconds=0.2)) == [1, "timed_out", 3, "timed_out"]
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before  # a thread of an earlier test may have ended meanwhile


def test_an_interrupt_that_comes_as_the_calls_end_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control sends it where nothing catches it."""
    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    async def end(*, is_caught: bool) -> None:
        work = _Work([], lambda: None)

        def interrupt() -> None:
            work.interrupt(threading.current_thread())

        monkeypatch.setattr(work, "_make_calls", interrupt if is_caught else lambda: None)

        def run() -> None:
            work.run()
            if not is_caught:
                work._has_left = False
                interrupt()

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        work.interrupt(thread)  # it has left: nothing is sent to whichever thread has its number now

    asyncio.run(end(is_caught=True))
    assert printed == []
    asyncio.run(end(is_caught=False))
    assert len(printed) == 1


def test_a_call_that_waits_is_left_behind() -> None:
    began = time.monotonic()
    assert kinds(call_all(lambda: time.sleep(2), lambda: 3, seconds=0.1)) == ["timed_out", 3]
    assert time.monotonic() - began < 1.5


def test_the_limit_is_for_each_call_and_not_for_all() -> None:
    assert kinds(call_all(*[lambda: time.sleep(0.1)] * 6, seconds=0.4)) == [None] * 6


def test_the_event_loop_goes_on_during_calls() -> None:
    async def main() -> object:
        go = threading.Event()
        work = asyncio.ensure_future(EnvironmentCalls(60).call(lambda: go.wait(60)))
        await asyncio.sleep(0.05)
        assert not work.done()
        go.set()  # the loop is not blocked: it gets here while the call waits
        return (await work).value

    assert asyncio.run(main()) is True


def test_async_calls_wait_side_by_side_and_each_has_the_limit() -> None:
    async def slow(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def broken() -> float:
        raise ValueError("x")

    began = time.monotonic()
    outcomes = call_all(*[lambda: slow(0.2)] * 10, broken, lambda: slow(60), seconds=0.5)
    assert kinds(outcomes) == [0.2] * 10 + ["raised", "timed_out"]
    assert time.monotonic() - began < 1.5


def test_a_call_returns_before_later_ones_have_ended() -> None:
    async def main() -> None:
        calls, go = EnvironmentCalls(60), threading.Event()
        first, second = (asyncio.ensure_future(calls.call(one)) for one in (lambda: 1, lambda: go.wait(60)))
        assert (await asyncio.wait_for(first, 5)).value == 1
        assert not second.done()
        go.set()
        assert (await second).value is True

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_its_turn_is_not_made() -> None:
    async def main() -> list[int]:
        calls, go, made = EnvironmentCalls(60), threading.Event(), list[int]()
        first = asyncio.ensure_future(calls.call(lambda: go.wait(60)))
        others = [asyncio.ensure_future(calls.call(lambda number=number: made.append(number))) for number in (1, 2)]  # type: ignore[misc]
        await asyncio.sleep(0.05)
        others[0].cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, others[1])
        return made

    assert asyncio.run(main()) == [2]
