"""Child processes of an Atropos run, which live no longer than this process. Owned by `Launcher`.

A `SupervisedProcess` starts when it is due, and again when it ends too early, up to a bound.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

WATCHDOG = Path(__file__).with_name("watchdog.py")
SECONDS_TO_END = 10.0
"""Longest end of the watchdog; more than its own patience with the command."""
STEADY_SECONDS = 60.0
"""Lifetime of a process after which its failures in a row count from 0."""
MAX_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


def variables_for(python: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a program of `python`; another interpreter must not find our packages."""
    inherited = dict(os.environ)
    if Path(python) != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME"):
            inherited.pop(name, None)
    return inherited | {"PYTHONUNBUFFERED": "1"} | dict(own)


class SupervisedProcess:
    """A command that should run, with its output in `log`.

    Nothing happens but in `supervise`, which is called some times a second. Ctrl-C in the terminal does not reach it;
    any end of this process does.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str],
        log: Path,
        max_restarts: int,
    ) -> None:
        self.name, self.log = name, log
        self._command, self._folder, self._variables = command, folder, variables
        self._max_restarts = max_restarts
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._started = self._due = 0.0
        self._num_failures = 0  # in a row
        self.exit_code: int | None = None
        """As in a shell, of its last end by itself: 128 + N after signal N; None while it runs."""
        self.has_given_up = False

    @property
    def is_running(self) -> bool:
        return self._watchdog is not None

    def supervise(self, now: float) -> bool:
        """Start it if that is due. Return whether it has ended since the last call; `exit_code` says how.

        Raises OSError where the folder is not there or the log cannot be written.
        """
        if self._watchdog is None:
            if now >= self._due and not self.has_given_up and self.exit_code != 0:
                self._watchdog, self._started, self.exit_code = self._start(), now, None
            return False
        code = self._watchdog.poll()
        if code is None:
            return False
        _close_pipe(self._watchdog)
        self._watchdog, self.exit_code = None, code
        if code != 0:
            self._fail(now)
        return True

    async def end(self) -> None:
        """End it with all that it has started, first by SIGTERM, and forget its failures.

        Returns when it has ended; the next `supervise` starts it.
        """
        if self._watchdog is not None:
            watchdog, self._watchdog = self._watchdog, None
            _close_pipe(watchdog)
            try:
                await asyncio.to_thread(watchdog.wait, SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                watchdog.kill()
                await asyncio.to_thread(watchdog.wait)
        self.exit_code, self._num_failures, self._due, self.has_given_up = None, 0, 0.0, False

    def log_tail(self, number: int = 3) -> str:
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
            return " | ".join([line for line in lines if line][-number:])
        return ""

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(WATCHDOG), *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env=self._variables,
                start_new_session=True,
            )

    def _fail(self, now: float) -> None:
        self._num_failures = 1 if now - self._started > STEADY_SECONDS else self._num_failures + 1
        self.has_given_up = self._num_failures > self._max_restarts
        pause = min(2.0 ** (self._num_failures - 1), MAX_PAUSE_SECONDS)
        self._due = now + pause
        what = "given up (rollout.atropos.start.max_restarts)" if self.has_given_up else f"again in {pause:.0f} s"
        logger.warning("%s has ended with %d; %s", self.name, self.exit_code, what)


def _close_pipe(watchdog: "subprocess.Popen[bytes]") -> None:
    assert watchdog.stdin is not None
    watchdog.stdin.close()
