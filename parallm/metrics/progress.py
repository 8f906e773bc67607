"""How far a long piece of work is, in words."""

import time
from collections.abc import Callable

SECONDS_BETWEEN = 10.0


class SeldomProgress:
    """Speaks once in `SECONDS_BETWEEN`, and never of work that has just begun or has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_done: int | None = None
        self._spoke = 0.0

    def text(self, done: int, total: int) -> str:
        """Such as `128 of 512`; empty where nothing is to be said."""
        if self._last_done is None or done <= self._last_done:  # other work
            self._spoke = self._clock()
        self._last_done = done
        if done >= total or self._clock() - self._spoke < SECONDS_BETWEEN:
            return ""
        self._spoke = self._clock()
        return f"{done} of {total}"
