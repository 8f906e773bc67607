"""Several engines on one device thread: turns by seconds, failures of one alone, loads between their steps."""

import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from parallm.device.engines import Engines
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.types import TrafficClass


class Engine:
    """Steps for as long as it has units; each takes `seconds`."""

    def __init__(self, units: int, seconds: float = 0.0, *, is_broken: bool = False) -> None:
        self.units = units
        self.seconds = seconds
        self.is_broken = is_broken
        self.num_steps = 0
        self.num_flushes = 0
        self.failures: list[str] = []

    def has_work(self, traffic: TrafficClass) -> bool:
        return traffic == "serving" and self.units > 0

    def step(self, traffic: TrafficClass) -> None:
        if self.is_broken:
            raise ValueError("broken unit")
        time.sleep(self.seconds)
        self.units -= 1
        self.num_steps += 1

    def flush(self, traffic: TrafficClass) -> None:
        self.num_flushes += 1

    def prepare(self) -> bool:
        return False

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        self.units = 0
        self.failures.append(str(error))


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


def test_engines_take_turns_by_the_seconds_that_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("parallm.device.engines.time.perf_counter", lambda: clock[0])

    class Timed(Engine):
        def step(self, traffic: TrafficClass) -> None:
            clock[0] += self.seconds
            self.units -= 1
            self.num_steps += 1

    slow, fast = Timed(100, 4.0), Timed(100, 1.0)
    engines = Engines([slow, fast])
    for _ in range(50):
        engines.step("serving")
    assert (slow.num_steps, fast.num_steps) == (10, 40)
    late = Timed(100, 1.0)
    engines.engines.append(late)
    for _ in range(6):
        engines.step("serving")
    assert late.num_steps <= 3, "time before its first request is not made up for"


def test_the_step_of_one_engine_is_finished_before_that_of_another() -> None:
    first, second = Engine(3), Engine(3)
    engines = Engines([first, second])
    for _ in range(6):
        engines.step("serving")
    assert first.num_flushes + second.num_flushes >= 2
    before = first.num_flushes + second.num_flushes
    engines.flush("serving")
    engines.flush("serving")
    assert first.num_flushes + second.num_flushes == before + 1


def test_a_unit_that_fails_ends_requests_of_its_own_engine_alone(device: DeviceThread) -> None:
    good, bad = Engine(0), Engine(0, is_broken=True)
    device.attach(good)
    device.call(lambda: device.attach(bad)).result(5)
    device.call(lambda: setattr(good, "units", 20)).result(5)
    device.call(lambda: setattr(bad, "units", 20)).result(5)
    while good.units or bad.units:
        device.wake()
        time.sleep(0.01)
    assert (bad.failures, good.failures, good.num_steps) == (["broken unit"], [], 20)


def test_the_end_of_the_thread_fails_all(device: DeviceThread) -> None:
    engines = [Engine(0), Engine(0), Engine(0)]
    device.attach(engines[0])
    for engine in engines[1:]:
        device.call(lambda engine=engine: device.attach(engine)).result(5)  # type: ignore[misc]  # bound now
    device.stop()
    assert [len(engine.failures) for engine in engines] == [2, 2, 2]


def test_a_detached_engine_is_forgotten_and_the_one_left_is_the_worker_again(device: DeviceThread) -> None:
    first, second, third = Engine(0), Engine(0), Engine(0)
    device.attach(first)
    for engine in (second, third):
        device.call(lambda engine=engine: device.attach(engine)).result(5)  # type: ignore[misc]  # bound now
    device.call(lambda: device.detach(second)).result(5)
    device.call(lambda: device.detach(third)).result(5)
    assert device._worker is first
    device.stop()
    assert (second.failures, third.failures) == ([], [])


def test_units_of_a_load_run_between_steps(device: DeviceThread) -> None:
    engine = Engine(0, seconds=0.001)
    device.attach(engine)
    steps: list[int] = []

    def units() -> Iterator[int | None]:
        for _ in range(10):
            steps.append(engine.num_steps)
            time.sleep(0.001)
            yield None
        yield 7

    def begin() -> Future[int | None]:
        engine.units = 200
        return device.load(units())

    assert device.call(begin).result(5).result(20) == 7
    assert len(set(steps)) > 3, "the engine stepped meanwhile"


def test_a_load_that_fails_says_so(device: DeviceThread) -> None:
    def units() -> Iterator[None]:
        yield None
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        device.load(units()).result(5)
