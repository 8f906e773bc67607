import asyncio
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import mlx.core as mx
import pytest

from parallm.device.governor import Governor
from parallm.device.thread import QUIET_SECONDS, DeviceThread, run_until_it_waits
from parallm.errors import EngineStopped
from parallm.model.kernels.cuda import on_cuda
from parallm.types import TrafficClass

needs_policies = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH") or on_cuda(), reason="policies of Linux, for CPUs")


class Counter:
    """A worker with a number of units per class; a unit of `broken` fails."""

    def __init__(self, units: dict[TrafficClass, int], broken: TrafficClass | None = None) -> None:
        self.units = units
        self.broken = broken
        self.done: list[str] = []
        self.failures: list[tuple[TrafficClass, str]] = []
        self.flushed: list[tuple[TrafficClass, int]] = []
        """Class, and the units of all classes that were done by then."""
        self.num_unprepared = 0

    def has_work(self, traffic: TrafficClass) -> bool:
        return self.units.get(traffic, 0) > 0

    def step(self, traffic: TrafficClass) -> None:
        if traffic == self.broken:
            raise ValueError("broken unit")
        self.units[traffic] -= 1
        self.done.append(traffic)

    def flush(self, traffic: TrafficClass) -> None:
        self.flushed.append((traffic, len(self.done)))

    def prepare(self) -> bool:
        if self.num_unprepared:
            self.num_unprepared -= 1
            self.done.append("prepared")
            return True
        return False

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        self.units[traffic] = 0
        self.failures.append((traffic, str(error)))


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


def blocked(device: DeviceThread) -> tuple[threading.Event, Future[bool]]:
    """A call that holds the thread from now on until the event is set."""
    started, go = threading.Event(), threading.Event()

    def hold() -> bool:
        started.set()
        return go.wait(5)

    call = device.call(hold)
    assert started.wait(5)
    return go, call


def test_calls_run_in_order_on_the_one_thread(device: DeviceThread) -> None:
    names = [device.call(lambda: threading.current_thread().name) for _ in range(3)]
    assert {name.result(5) for name in names} == {"device"}
    made: list[int] = []
    for number in range(5):
        device.call(lambda number=number: made.append(number))  # type: ignore[misc]  # a default binds the number
    device.call(lambda: None).result(5)
    assert made == [0, 1, 2, 3, 4]


def test_an_error_of_a_call_belongs_to_its_caller_alone(device: DeviceThread) -> None:
    with pytest.raises(ZeroDivisionError):
        device.call(lambda: 1 / 0).result(5)
    assert device.call(lambda: 7).result(5) == 7


def test_a_cancelled_call_does_not_run(device: DeviceThread) -> None:
    go, _ = blocked(device)
    made: list[int] = []
    late = device.call(lambda: made.append(1))
    assert late.cancel()
    go.set()
    device.call(lambda: None).result(5)
    assert made == []


def test_an_update_gives_what_its_last_unit_yields(device: DeviceThread) -> None:
    assert device.iterate(iter([1, 2, 3])).result(5) == 3
    assert device.governor.seconds["learning"] > 0


def test_units_of_the_engine_run_between_those_of_an_update(device: DeviceThread) -> None:
    worker = Counter({"serving": 50})

    def units() -> Iterator[int]:
        for number in range(50):
            worker.done.append("learning")
            time.sleep(0.0005)
            yield number

    go, _ = blocked(device)
    device.attach(worker)
    update = device.iterate(units())
    go.set()
    assert update.result(5) == 49
    assert "serving" in worker.done[:90]
    assert worker.done.count("learning") == 50


def test_an_error_in_an_update_belongs_to_whoever_waits_for_it(device: DeviceThread) -> None:
    def units() -> Iterator[int]:
        yield 1
        raise ValueError("no gradient")

    with pytest.raises(ValueError, match="no gradient"):
        device.iterate(units()).result(5)
    assert device.iterate(iter([4])).result(5) == 4


def test_a_second_update_at_the_same_time_waits_for_the_end_of_the_first(device: DeviceThread) -> None:
    order: list[str] = []

    def units(name: str) -> Iterator[str]:
        for number in range(3):
            order.append(f"{name}{number}")
            yield name

    go, _ = blocked(device)
    first, cancelled, third = (device.iterate(units(name)) for name in "abc")
    assert cancelled.cancel()
    go.set()
    assert (first.result(5), third.result(5)) == ("a", "c")
    assert order == ["a0", "a1", "a2", "c0", "c1", "c2"]


def test_an_update_that_waits_is_failed_when_the_thread_stops(device: DeviceThread) -> None:
    go, _ = blocked(device)
    first, second = device.iterate(itertools.repeat(1)), device.iterate(iter([2]))
    go.set()
    device.call(lambda: None).result(5)
    device.stop()
    for update in (first, second):
        with pytest.raises(EngineStopped):
            update.result(5)


def test_cancelling_the_task_that_waits_for_an_update_leaves_the_thread_alive(device: DeviceThread) -> None:
    async def cancel(delay: float) -> None:
        update = asyncio.ensure_future(asyncio.wrap_future(device.iterate(slow())))
        await asyncio.sleep(delay)
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)

    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    asyncio.run(cancel(0.015))
    time.sleep(0.05)
    asyncio.run(cancel(0.0))
    assert device.call(lambda: 7).result(5) == 7
    assert device.iterate(iter([4])).result(5) == 4


def test_a_failing_unit_fails_its_class_and_the_loop_goes_on(
    device: DeviceThread, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Counter({"serving": 3, "rollout": 3}, broken="serving")
    device.attach(worker)
    deadline = time.monotonic() + 5
    while worker.done.count("rollout") < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.failures == [("serving", "broken unit")]
    assert worker.done == ["rollout"] * 3
    assert "a serving step failed" in caplog.text


def test_a_class_is_flushed_before_another_kind_of_work_begins(device: DeviceThread) -> None:
    worker = Counter({"serving": 4, "rollout": 4})
    go, _ = blocked(device)
    device.attach(worker)
    update = device.iterate(iter([1, 2]))
    go.set()
    update.result(5)
    deadline = time.monotonic() + 5
    while len(worker.done) < 8 and time.monotonic() < deadline:
        time.sleep(0.001)
    for place, (one, other) in enumerate(itertools.pairwise(worker.done), 1):
        if one != other:
            assert (one, place) in worker.flushed
    assert all(worker.done[place - 1] == traffic for traffic, place in worker.flushed)


def test_a_worker_prepares_while_it_has_no_work(device: DeviceThread) -> None:
    worker = Counter({})
    worker.num_unprepared = 3
    device.attach(worker)
    deadline = time.monotonic() + 5
    while worker.num_unprepared and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.done == ["prepared"] * 3
    worker.num_unprepared = 1
    begun = time.monotonic()
    device.call(lambda: None).result()
    while worker.num_unprepared and time.monotonic() < deadline:
        time.sleep(0.001)
    assert time.monotonic() - begun >= QUIET_SECONDS, "not in the pauses of a run"
    worker.num_unprepared = 10**9
    known = [device.is_serving]
    worker.units["serving"] = 5
    known.append(device.is_serving)
    assert known == [False, True]
    device.wake()
    while worker.units["serving"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.done[-1] in ("prepared", "serving")
    first = worker.done.index("serving")
    assert worker.done[first : first + 5] == ["serving"] * 5, "requests come first"
    assert device.call(lambda: 4).result(5) == 4, "and calls do not wait for the end"


def test_a_failure_to_flush_is_that_of_the_class_that_is_flushed(device: DeviceThread) -> None:
    class Unflushed(Counter):
        def flush(self, traffic: TrafficClass) -> None:
            raise ValueError(f"{traffic} is lost")

    worker = Unflushed({"serving": 10**9})
    device.attach(worker)
    while not worker.done:
        time.sleep(0.001)
    assert device.iterate(iter([3])).result(5) == 3
    assert worker.failures == [("serving", "serving is lost")]


def test_stopping_fails_what_is_queued_and_what_is_asked_later() -> None:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    worker = Counter({})
    device.attach(worker)
    go, running = blocked(device)
    queued, update = device.call(lambda: 1), device.iterate(iter([1]))
    stopper = threading.Thread(target=device.stop)
    stopper.start()
    while device.is_alive:
        time.sleep(0.001)
    go.set()
    stopper.join(5)
    assert running.result(5)
    for waiting in (queued, update):
        with pytest.raises(EngineStopped):
            waiting.result(5)
    assert [traffic for traffic, _ in worker.failures] == ["serving", "rollout"]
    with pytest.raises(EngineStopped, match="restart"):
        device.call(lambda: 1)
    assert not device.is_alive
    device.stop()


def test_stopping_during_an_update_fails_its_future() -> None:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    started = threading.Event()

    def endless() -> Iterator[int]:
        while True:
            started.set()
            time.sleep(0.001)
            yield 1

    update = device.iterate(endless())
    assert started.wait(5)
    device.stop()
    with pytest.raises((EngineStopped, CancelledError)):
        update.result(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_failure_handling_breaks_leaves_nobody_waiting() -> None:
    class Broken(Counter):
        def fail(self, traffic: TrafficClass, error: Exception) -> None:
            raise RuntimeError("cannot even fail")

    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    go, _ = blocked(device)
    device.attach(Broken({"serving": 1}, broken="serving"))
    update = device.iterate(endless_units())
    go.set()
    with pytest.raises(EngineStopped):
        update.result(5)
    device.stop()  # waits for the thread, whose exception belongs to this test
    assert not device.is_alive


def endless_units() -> Iterator[int]:
    while True:
        yield 1


def test_scoring_gives_what_its_last_unit_yields_and_counts_as_rollout(device: DeviceThread) -> None:
    assert [device.score(iter([None, [number]])).result(5) for number in range(3)] == [[0], [1], [2]]
    assert device.governor.seconds["rollout"] > 0
    assert device.governor.seconds["learning"] == 0


def test_units_of_scoring_take_turns_with_serving_and_come_before_sampling(device: DeviceThread) -> None:
    worker = Counter({"serving": 50, "rollout": 5})

    def units() -> Iterator[int]:
        for number in range(50):
            worker.done.append("scoring")
            time.sleep(0.0005)
            yield number

    go, _ = blocked(device)
    device.attach(worker)
    scoring = device.score(units())
    go.set()
    assert scoring.result(5) == 49
    last = len(worker.done) - worker.done[::-1].index("scoring")
    assert "serving" in worker.done[:last]
    assert "rollout" not in worker.done[:last]


def test_an_error_in_scoring_belongs_to_whoever_waits_for_it(device: DeviceThread) -> None:
    def units() -> Iterator[int]:
        yield 1
        raise ValueError("no score")

    with pytest.raises(ValueError, match="no score"):
        device.score(units()).result(5)
    assert device.score(iter([4])).result(5) == 4


def test_scoring_that_nobody_waits_for_any_more_ends(device: DeviceThread) -> None:
    done: list[int] = []
    go, _ = blocked(device)
    given_up, next_one = device.score(map(done.append, range(9))), device.score(iter([5]))
    assert given_up.cancel()
    go.set()
    assert next_one.result(5) == 5
    assert done == []


def test_scoring_fails_when_the_thread_ends(device: DeviceThread) -> None:
    go, _ = blocked(device)
    waiting = device.score(iter([1]))
    stopper = threading.Thread(target=device.stop)
    stopper.start()
    go.set()
    stopper.join(5)
    with pytest.raises(EngineStopped):
        waiting.result(5)
    with pytest.raises(EngineStopped):
        device.score(iter([1]))


def test_an_update_that_waits_is_parked_and_others_go_on(device: DeviceThread) -> None:
    worker = Counter({"serving": 50})
    awaited: Future[str] = Future()

    def update() -> Iterator[str | Future[str] | None]:
        yield None
        yield awaited
        yield f"got {awaited.result()}"

    units = device.iterate(update())
    time.sleep(0.1)
    device.attach(worker)
    deadline = time.monotonic() + 5
    while worker.units["serving"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.units["serving"] == 0
    assert not units.done()
    awaited.set_result("it")
    assert units.result(5) == "got it"


def test_the_error_that_a_parked_update_waits_for_is_its_own(device: DeviceThread) -> None:
    awaited: Future[str] = Future()

    def update() -> Iterator[Future[str] | str]:
        yield awaited
        yield awaited.result()

    units, later = device.iterate(update()), device.iterate(iter(["later"]))
    assert not later.done()
    awaited.set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        units.result(5)
    assert later.result(5) == "later"


def test_vectors_of_several_requests_take_turns_and_count_by_themselves(device: DeviceThread) -> None:
    order: list[str] = []

    def units(name: str, number: int) -> Iterator[str]:
        for _ in range(number):
            order.append(name)
            time.sleep(0.0005)
            yield name

    go, _ = blocked(device)
    long, short = device.encode(units("long", 20)), device.encode(units("short", 2))
    go.set()
    assert (long.result(5), short.result(5)) == ("long", "short")
    assert order[:4] == ["long", "short", "long", "short"]
    assert device.governor.seconds["encoding"] > 0
    assert device.governor.seconds["rollout"] == 0


def test_a_request_for_vectors_that_is_cancelled_ends_after_its_unit(device: DeviceThread) -> None:
    vectors = device.encode(endless_units())
    time.sleep(0.05)
    assert vectors.cancel()
    assert device.encode(iter([7])).result(5) == 7
    deadline = time.monotonic() + 5
    while device._encodings and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not device._encodings


def tasks() -> set[int]:
    """The threads of this process."""
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


@pytest.fixture
def usual_policy() -> Iterator[None]:
    """Schedules the test's thread as Linux does by default."""
    own = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        pytest.skip("this container forbids it")
    yield
    os.sched_setscheduler(0, own, os.sched_param(0))


@needs_policies
@pytest.mark.usefixtures("usual_policy")
def test_the_thread_and_its_streams_keep_their_cores_until_they_wait() -> None:
    before = tasks()
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))

    def compute() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.eval(mx.ones(8) + 1)

    try:
        device.call(compute).result()
        started = tasks() - before
        assert len(started) >= 2
        assert {os.sched_getscheduler(task) for task in started} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        device.stop()


@needs_policies
def test_a_policy_that_a_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: chosen.append(policy))
    for policy, expected in ((os.SCHED_IDLE, []), (os.SCHED_OTHER, [os.SCHED_BATCH])):
        monkeypatch.setattr(os, "sched_getscheduler", lambda _, policy=policy: policy)
        run_until_it_waits()
        assert chosen == expected


def test_nothing_is_decoded_once_an_update_has_ended_a_unit_or_without_requests(device: DeviceThread) -> None:
    worker, seen = Counter({}), [device.is_decoding]

    def units() -> Iterator[int]:
        for number in range(3):
            seen.append(device.is_decoding)
            yield number

    device.attach(worker)
    seen.append(device.is_decoding)
    hold, held = blocked(device)
    worker.units["rollout"] = 10**6
    learned = device.iterate(units())
    hold.set()
    held.result(5)
    learned.result(5)
    worker.units["rollout"] = 0
    assert seen == [False, False, True, False, False]


def test_requests_are_decoded_while_an_update_is_parked(device: DeviceThread) -> None:
    is_in_second, awaited = threading.Event(), Future[object]()

    def units() -> Iterator[int | Future[object]]:
        yield 1
        is_in_second.set()
        yield awaited
        yield 2

    worker = Counter({"rollout": 10**6})
    device.attach(worker)
    learned = device.iterate(units())
    assert is_in_second.wait(5)
    assert device.call(lambda: device.is_decoding).result(5), "between two units, so the update is parked"
    worker.units["rollout"] = 0
    awaited.set_result(None)
    assert learned.result(5) == 2
