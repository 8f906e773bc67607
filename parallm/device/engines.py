"""Engines from the view of the device thread: one, or several that take turns."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from parallm.types import TrafficClass


class Worker(Protocol):
    """An engine."""

    def has_work(self, traffic: TrafficClass) -> bool: ...

    def step(self, traffic: TrafficClass) -> None: ...

    def flush(self, traffic: TrafficClass) -> None:
        """Finish the last step of a class, if it is still on the device."""

    def prepare(self) -> bool:
        """Do a part of what later units would have to do first, tens of milliseconds long; False if nothing is left."""

    def fail(self, traffic: TrafficClass, error: Exception) -> None: ...


class Engines:
    """Engines that take turns: of those with work of a class, the one that has had the fewest seconds of it.

    Used by the device thread alone, as `Worker`.
    """

    def __init__(self, engines: Sequence[Worker]) -> None:
        self.engines = list(engines)
        self._seconds: defaultdict[tuple[Worker, TrafficClass], float] = defaultdict(float)
        self._ready: dict[TrafficClass, set[Worker]] = {"serving": set(), "rollout": set()}
        """Engines that had work at the last step of a class."""
        self._unflushed: Worker | None = None
        self._at_work: Worker | None = None

    def has_work(self, traffic: TrafficClass) -> bool:
        return any(engine.has_work(traffic) for engine in self.engines)

    def step(self, traffic: TrafficClass) -> None:
        engine = self._next(traffic)
        if self._unflushed is not engine:  # so that its seconds count for the engine whose step it is
            self.flush(traffic)
        self._unflushed = engine
        self._run(engine, traffic, engine.step)

    def flush(self, traffic: TrafficClass) -> None:
        engine, self._unflushed = self._unflushed, None
        if engine is not None:
            self._run(engine, traffic, engine.flush)

    def prepare(self) -> bool:
        return any(engine.prepare() for engine in self.engines)

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        """End requests of the engine at work, or of all where none was."""
        at_work, self._at_work = self._at_work, None
        for engine in self.engines if at_work is None else (at_work,):
            engine.fail(traffic, error)

    def remove(self, engine: Worker) -> None:
        """Forget an engine without work."""
        self.engines.remove(engine)
        self._unflushed = None if self._unflushed is engine else self._unflushed
        for traffic, ready in self._ready.items():
            ready.discard(engine)
            self._seconds.pop((engine, traffic), None)

    def _next(self, traffic: TrafficClass) -> Worker:
        ready = [engine for engine in self.engines if engine.has_work(traffic)]
        waited = [self._seconds[engine, traffic] for engine in ready if engine in self._ready[traffic]]
        for engine in ready:  # idle time saves nothing up
            if engine not in self._ready[traffic] and waited:
                self._seconds[engine, traffic] = max(self._seconds[engine, traffic], min(waited))
        self._ready[traffic] = set(ready)
        return min(ready, key=lambda engine: self._seconds[engine, traffic])

    def _run(self, engine: Worker, traffic: TrafficClass, unit: Callable[[TrafficClass], None]) -> None:
        self._at_work = engine
        began = time.perf_counter()
        unit(traffic)
        self._seconds[engine, traffic] += time.perf_counter() - began
        self._at_work = None
