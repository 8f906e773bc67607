"""The scheduler of the device: shares of device seconds between serving, rollouts and learning.

The device thread asks it before each unit of work. It is weighted fair queueing over seconds, first between engine and
learner, then between the engine's two traffic classes: each has a virtual clock that advances by seconds / share, and
the ready one whose clock is furthest behind runs next. It is work-conserving: a class without work loses its turn and
saves nothing up.
"""

from collections.abc import Collection
from typing import Generic, Literal, TypeVar

MIN_SHARE = 1e-6  # a share of zero runs only when the others have no work

Work = Literal["serving", "rollout", "learning"]
Name = TypeVar("Name", bound=str)


class Governor:
    """Chooses the next kind of work. Used by the device thread alone; shares may be set from any thread."""

    def __init__(self, *, serving_share: float, engine_share: float) -> None:
        self.serving_share = serving_share
        """Share of the engine's seconds for serving, while rollouts have work too."""
        self.engine_share = engine_share
        """Share of all seconds for the engine, while serving traffic and the learner have work."""
        self.seconds: dict[Work, float] = {"serving": 0.0, "rollout": 0.0, "learning": 0.0}
        self._sides: _FairQueue[Literal["engine", "learner"]] = _FairQueue()
        self._traffic: _FairQueue[Literal["serving", "rollout"]] = _FairQueue()

    def choose(self, ready: Collection[Work]) -> Work:
        """Return the kind of work to run next; `ready` is not empty.

        Without serving traffic the learner goes first.
        """
        sides: set[Literal["engine", "learner"]] = set()
        if "learning" in ready:
            sides.add("learner")
        if "serving" in ready or "learning" not in ready:
            sides.add("engine")
        if self._sides.choose(sides) == "learner":
            return "learning"
        return self._traffic.choose({work for work in ready if work != "learning"})

    def charge(self, work: Work, seconds: float) -> None:
        """Account for the seconds of a finished unit."""
        self.seconds[work] += seconds
        if work == "learning":
            self._sides.charge("learner", seconds, 1 - self.engine_share)
        else:
            self._sides.charge("engine", seconds, self.engine_share)
            share = self.serving_share if work == "serving" else 1 - self.serving_share
            self._traffic.charge(work, seconds, share)


class _FairQueue(Generic[Name]):
    """Virtual clocks by name. A name that becomes ready again starts at the clock of the others."""

    def __init__(self) -> None:
        self._clocks: dict[Name, float] = {}
        self._ready: set[Name] = set()

    def choose(self, ready: set[Name]) -> Name:
        clocks = [self._clocks[name] for name in ready & self._ready]
        floor = min(clocks, default=max(self._clocks.values(), default=0.0))
        for name in ready - self._ready:
            self._clocks[name] = max(self._clocks.get(name, 0.0), floor)
        self._ready = ready
        return min(sorted(ready), key=lambda name: self._clocks[name])

    def charge(self, name: Name, seconds: float, share: float) -> None:
        self._clocks[name] = self._clocks.get(name, 0.0) + seconds / max(share, MIN_SHARE)
