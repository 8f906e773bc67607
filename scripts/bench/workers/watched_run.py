"""A run of `parallm.train` that counts what its watchers cost, and is slower while there are any if it is told to.

WATCHED_SLEEP: fraction of each step's seconds that a watched step sleeps more, a control of the measurement.
WATCHED_COST: file that gets the seconds of thread time in the code that tells watchers, a line a step.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from parallm.metrics import live_run, pulse
from parallm.metrics.live_run import LiveRun

SLEEP, COST = float(os.environ.get("WATCHED_SLEEP", "0")), os.environ.get("WATCHED_COST", "")


class Clock:
    """Thread time in the outermost of the functions that it counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            began, self._depth = time.thread_time(), self._depth + 1
            try:
                return function(*arguments, **keywords)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began

        return counted


def main() -> None:
    clock, tell_step = Clock(), LiveRun.step
    for owner, names in ((LiveRun, ("evaluation", "tell_status")), (live_run.News, ("tell",))):
        for name in names:
            setattr(owner, name, clock.counting(getattr(owner, name)))
    setattr(pulse.Pulse, "beat", clock.counting(pulse.Pulse.beat))  # noqa: B010
    counted = clock.counting(tell_step)

    def step(run: LiveRun, row: Any) -> None:
        counted(run, row)
        if run._news.num_watchers and SLEEP:
            time.sleep(SLEEP * row["seconds/total"])
        if COST:
            with Path(COST).open("a") as lines:
                lines.write(f"{clock.seconds} {row['seconds/total']}\n")
            clock.seconds = 0.0

    setattr(LiveRun, "step", step)  # noqa: B010
    import_module("parallm.train").main()  # the package's attribute of this name is a function


if __name__ == "__main__":
    main()
