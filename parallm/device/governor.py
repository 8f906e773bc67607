"""The scheduler of the device: shares of device seconds between serving, rollouts and learning.

The device thread asks it before each unit of work. It is weighted fair queueing over seconds, first between engine and
learner, then between serving and what is left of the engine's work, which rollouts, encoding and loads of models share
evenly: each has a virtual clock that advances by seconds / share, and the ready one whose clock is furthest behind runs
next. It is work-conserving: a class without work loses its turn and saves nothing up.

With a latency target serving goes first, and other work gets what the target leaves.
"""

from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Generic, Literal, TypeVar, get_args

MIN_SHARE = 1e-6  # a share of zero runs only when the others have no work
IDLE_INTERVALS, MIN_IDLE_INTERVALS, SWITCHES = 64, 8, 8
MAX_MIXED_INTERVALS = 15
"""An interval without other work follows after these: serving's own figure changes with its number of rows."""
LOADING_SHARE = 1 / 3
"""Share of what serving leaves that a load of a model takes: its units cost the next step what caches have lost."""

Work = Literal["serving", "rollout", "encoding", "loading", "learning"]
Name = TypeVar("Name", bound=str)


class Governor:
    """Chooses the next kind of work. Used by the device thread alone; shares may be set from any thread."""

    def __init__(
        self, *, serving_share: float, engine_share: float, serving_latency_target: float | None = None
    ) -> None:
        self.serving_share = serving_share
        """Share of the engine's seconds for serving, while rollouts, encoding or loads have work too."""
        self.engine_share = engine_share
        """Share of all seconds for the engine, while serving traffic and the learner have work."""
        self.serving_latency_target = serving_latency_target
        """Limit of the mean and of the median time between two units of serving, in multiples of what they take
        without other work. In place of both shares while serving has work; None: the shares decide."""
        self.seconds: dict[Work, float] = dict.fromkeys(get_args(Work), 0.0)
        self._intervals = _ServingIntervals()
        self._sides: _FairQueue[Literal["engine", "learner"]] = _FairQueue()
        self._traffic: _FairQueue[Literal["serving", "other"]] = _FairQueue()
        self._other: _FairQueue[Work] = _FairQueue()
        self._beside: _FairQueue[Work] = _FairQueue()
        self._is_by_target = False
        """Whether the target made the last choice."""

    def choose(self, ready: Collection[Work]) -> Work:
        """Return the kind of work to run next; `ready` is not empty.

        Without serving traffic, encoding and loads the learner goes first.
        """
        if "serving" not in ready:
            self._intervals.end()
        elif self.serving_latency_target is not None and len(ready) > 1:
            self._is_by_target = True
            other = self._choose_beside(ready)
            return other if self._intervals.has_time_for(other, self.serving_latency_target) else "serving"
        self._is_by_target = False
        return self._by_shares(set(ready))

    def _choose_beside(self, ready: Collection[Work]) -> Work:
        """Choose what runs beside serving: learning before rollouts, and encoding and loads in turns with either."""
        waiting: set[Work] = {work for work in ready if work != "serving"}
        if "learning" in waiting:
            waiting.discard("rollout")
        return self._beside.choose(waiting)

    def _by_shares(self, ready: set[Work]) -> Work:
        sides: set[Literal["engine", "learner"]] = set()
        if "learning" in ready:
            sides.add("learner")
        if ready & {"serving", "encoding", "loading"} or "learning" not in ready:
            sides.add("engine")
        if self._sides.choose(sides) == "learner":
            return "learning"
        others = ready - {"serving", "learning"}
        traffic: set[Literal["serving", "other"]] = {"serving"} if "serving" in ready else set()
        if self._traffic.choose(traffic | {"other"} if others else traffic) == "serving":
            return "serving"
        return self._other.choose(others)

    def charge(self, work: Work, seconds: float, *, is_flush: bool = False) -> None:
        """Account for the seconds of a finished unit, or of finishing one before other work begins."""
        self.seconds[work] += seconds
        if is_flush:
            self._intervals.delay(seconds)
        else:
            self._intervals.charge(work, seconds, self.serving_latency_target)
        if work == "learning":
            self._sides.charge("learner", seconds, 1 - self.engine_share)
        else:
            self._sides.charge("engine", seconds, self.engine_share)
            if work == "serving":
                self._traffic.charge("serving", seconds, self.serving_share)
            else:
                counted = seconds / LOADING_SHARE if work == "loading" else seconds
                self._traffic.charge("other", counted, 1 - self.serving_share)
                self._other.charge(work, seconds, 0.5)
        if self._is_by_target and work != "serving":
            self._beside.charge(work, seconds, 0.5)


class _ServingIntervals:
    """Times between two units of serving: how long without other work, and how much other work they can hold.

    Other work that exceeds the target of one interval is made up for by the next ones: the time by which intervals
    fall short of the target pays for it. Two such intervals never follow each other, which bounds the median.
    """

    def __init__(self) -> None:
        self._idle_seconds: deque[float] = deque(maxlen=IDLE_INTERVALS)
        self._idle_median = 0.0
        self._unit_seconds: dict[Work, float] = {}
        """Length of the newest unit of other work."""
        self._other_seconds: float | None = None
        """Seconds of other work since serving's last unit; None before its first one."""
        self._credit = 0.0
        """Seconds by which intervals fell short of the target; of at most one interval, so that nothing is saved up."""
        self._switch_seconds = 0.0
        """Moving mean of how much longer units after other work take: they cannot overlap with the unit before."""
        self._was_late = False
        self._num_mixed = 0

    def end(self) -> None:
        """Serving has no work."""
        self._other_seconds = None

    def has_time_for(self, work: Work, target: float) -> bool:
        if self._other_seconds is None or len(self._idle_seconds) < MIN_IDLE_INTERVALS:
            return False
        if self._credit < 0 or self._num_mixed >= MAX_MIXED_INTERVALS:
            return False
        other_seconds = self._other_seconds + self._unit_seconds.get(work, 0.0) + max(self._switch_seconds, 0.0)
        fits = self._idle_median + other_seconds <= target * self._idle_median
        return fits or (self._other_seconds == 0 and not self._was_late)

    def delay(self, seconds: float) -> None:
        """Count seconds that delay serving's next unit."""
        if self._other_seconds is not None:
            self._other_seconds += seconds

    def charge(self, work: Work, seconds: float, target: float | None) -> None:
        if work != "serving":
            self._unit_seconds[work] = seconds
            self.delay(seconds)
            return
        other_seconds, self._other_seconds = self._other_seconds or 0.0, 0.0
        own_seconds = seconds
        if other_seconds:
            self._num_mixed += 1
            own_seconds = self._idle_median
            self._switch_seconds += (seconds - self._idle_median - self._switch_seconds) / SWITCHES
        else:
            self._num_mixed = 0
            self._idle_seconds.append(seconds)
            self._idle_median = median(self._idle_seconds)
        if target is None:
            self._credit, self._was_late = 0.0, False
            return
        self._was_late = bool(other_seconds) and seconds + other_seconds > target * self._idle_median
        shortfall = target * own_seconds - (seconds + other_seconds)
        self._credit = min(self._credit + shortfall, (target - 1) * own_seconds)


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
