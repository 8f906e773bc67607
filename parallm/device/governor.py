"""Who gets the device next: shares of device seconds between serving, rollouts and learning.

Weighted fair queueing over seconds: each kind of work has a clock that runs at seconds / weight, and the ready kind
whose clock is furthest behind goes next. It is work-conserving: a kind that has nothing to do loses its turn, and does
not save it up.
"""

from collections.abc import Collection
from typing import Literal

Work = Literal["serving", "rollout", "learning"]


class Governor:
    """Decides between units of work. Used by the device thread alone; shares may be set from any thread."""

    def __init__(self, *, serving_share: float, engine_share: float) -> None:
        self.serving_share = serving_share
        """Of the engine's seconds, while rollouts want the engine too."""
        self.engine_share = engine_share
        """Of all seconds, while serving traffic is live and the learner has work."""
        self.seconds: dict[Work, float] = {"serving": 0.0, "rollout": 0.0, "learning": 0.0}
        self._clocks: dict[Work, float] = dict.fromkeys(self.seconds, 0.0)
        self._ready: set[Work] = set()

    def choose(self, ready: Collection[Work]) -> Work:
        """The kind of work to do next; `ready` is not empty.

        While no serving traffic is live the learner goes before everything else.
        """
        self._wake(set(ready))
        if "serving" not in ready and "learning" in ready:
            return "learning"
        return min(sorted(ready), key=lambda work: self._clocks[work])

    def charge(self, work: Work, seconds: float) -> None:
        """Account for a finished unit."""
        self.seconds[work] += seconds
        self._clocks[work] += seconds / max(self._weight(work), 1e-6)

    def _wake(self, ready: set[Work]) -> None:
        still = ready & self._ready
        floor = min((self._clocks[work] for work in still), default=max(self._clocks.values()))
        for work in ready - self._ready:
            self._clocks[work] = max(self._clocks[work], floor)
        self._ready = ready

    def _weight(self, work: Work) -> float:
        if work == "learning":
            return 1 - self.engine_share
        return self.engine_share * (self.serving_share if work == "serving" else 1 - self.serving_share)
