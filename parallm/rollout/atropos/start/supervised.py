"""One process that should run: started when it is due, and again when it ends too early, up to a bound."""

import logging
from collections.abc import Callable

from parallm.rollout.atropos.start.process import KeptProcess

STEADY_SECONDS = 60.0
"""Who has lived so long begins anew with its restarts."""
LONGEST_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class Supervised:
    """Nothing runs until `keep` is called, which is to be called often."""

    def __init__(self, name: str, start: Callable[[], KeptProcess], *, max_restarts: int) -> None:
        self.name = name
        self._start = start
        self._max_restarts = max_restarts
        self._process: KeptProcess | None = None
        self._started = self._due = 0.0
        self._num_failures = 0  # in a row
        self.exit_code: int | None = None
        """Of its last end by itself; None while it runs."""
        self.has_given_up = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def keep(self, now: float) -> bool:
        """Start it if that is due. True: it has ended since the last call; `exit_code` says how."""
        if self._process is None:
            if now >= self._due and not self.has_given_up and self.exit_code != 0:
                self._process, self._started, self.exit_code = self._start(), now, None
            return False
        code = self._process.exit_code
        if code is None:
            return False
        self._process, self.exit_code = None, code
        if code != 0:
            self._fail(now)
        return True

    async def end(self) -> None:
        """End it and forget its failures: the next `keep` starts it."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()
        self.exit_code, self._num_failures, self._due, self.has_given_up = None, 0, 0.0, False

    def _fail(self, now: float) -> None:
        self._num_failures = 1 if now - self._started > STEADY_SECONDS else self._num_failures + 1
        self.has_given_up = self._num_failures > self._max_restarts
        pause = min(2.0 ** (self._num_failures - 1), LONGEST_PAUSE_SECONDS)
        self._due = now + pause
        what = "given up (rollout.atropos.start.max_restarts)" if self.has_given_up else f"again in {pause:.0f} s"
        logger.warning("%s has ended with %d; %s", self.name, self.exit_code, what)
