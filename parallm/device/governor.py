"""Who gets the device next: shares of device seconds between serving, rollouts and learning.

Weighted fair queueing over seconds, first between engine and learner, then between the engine's two kinds of work: each
has a clock that runs at seconds / share, and the ready one whose clock is furthest behind goes next. It is
work-conserving: who has nothing to do loses the turn, and does not save it up.
"""

from collections.abc import Collection
from typing import Generic, Literal, TypeVar

MIN_SHARE = 1e-6  # a share of zero waits until the others have nothing to do

Work = Literal["serving", "rollout", "learning"]
Name = TypeVar("Name", bound=str)


class Governor:
    """Decides between units of work. Used by the device thread alone; shares may be set from any thread."""

    def __init__(self, *, serving_share: float, engine_share: float) -> None:
        self.serving_share = serving_share
        """Of the engine's seconds, while rollouts want the engine too."""
        self.engine_share = engine_share
        """Of all seconds, while serving traffic is live and the learner has work."""
        self.seconds: dict[Work, float] = {"serving": 0.0, "rollout": 0.0, "learning": 0.0}
        self._sides: _FairQueue[Literal["engine", "learner"]] = _FairQueue()
        self._traffic: _FairQueue[Literal["serving", "rollout"]] = _FairQueue()

    def choose(self, ready: Collection[Work]) -> Work:
        """The kind of work to do next; `ready` is not empty.

        While no serving traffic is live the learner goes before everything else.
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
        """Account for a finished unit."""
        self.seconds[work] += seconds
        if work == "learning":
            self._sides.charge("learner", seconds, 1 - self.engine_share)
        else:
            self._sides.charge("engine", seconds, self.engine_share)
            share = self.serving_share if work == "serving" else 1 - self.serving_share
            self._traffic.charge(work, seconds, share)


class _FairQueue(Generic[Name]):
    """Clocks of those who share; one who was not ready wakes at the time of the others."""

    def __init__(self) -> None:
        self._clocks: dict[Name, float] = {}
        self._ready: set[Name] = set()

    def choose(self, ready: set[Name]) -> Name:
        still = [self._clocks[name] for name in ready & self._ready]
        floor = min(still, default=max(self._clocks.values(), default=0.0))
        for name in ready - self._ready:
            self._clocks[name] = max(self._clocks.get(name, 0.0), floor)
        self._ready = ready
        return min(sorted(ready), key=lambda name: self._clocks[name])

    def charge(self, name: Name, seconds: float, share: float) -> None:
        self._clocks[name] = self._clocks.get(name, 0.0) + seconds / max(share, MIN_SHARE)
