"""Child processes of an Atropos run, which live no longer than this process. Started by `Launcher`.

`ChildProcess` is one process with its output in a file; `SupervisedProcess` starts it when it is due, and again when it
ends too early, up to a bound.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

WATCHDOG = Path(__file__).with_name("watchdog.py")
SECONDS_TO_END = 10.0
"""Longest end of the watchdog; more than its own patience with the command."""
STEADY_SECONDS = 60.0
"""Lifetime of a process after which its failures in a row count from 0."""
MAX_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ChildProcess:
    """A command that runs until `end`. Ctrl-C in the terminal does not reach it; any end of this process does."""

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str], log: Path) -> None:
        """Append its output to `log`. Raises OSError where `folder` is not there or `log` cannot be written."""
        with log.open("ab") as output:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WATCHDOG), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code as in a shell: 128 + N after signal N; None while it runs."""
        code = self._watchdog.poll()
        if code is not None:
            self._close_pipe()
        return code

    async def end(self) -> None:
        """End it with all that it has started, first by SIGTERM; return when it has ended."""
        self._close_pipe()
        try:
            await asyncio.to_thread(self._watchdog.wait, SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            await asyncio.to_thread(self._watchdog.wait)

    def _close_pipe(self) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()


def variables_for(python: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a program of `python`; another interpreter must not find our packages."""
    inherited = dict(os.environ)
    if Path(python) != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME"):
            inherited.pop(name, None)
    return inherited | {"PYTHONUNBUFFERED": "1"} | dict(own)


def log_tail(log: Path, number: int = 3) -> str:
    """The last lines of a log, in one line."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-number:])
    return ""


class SupervisedProcess:
    """A process that should run. Nothing happens but in `supervise`, which is called some times a second."""

    def __init__(self, name: str, start: Callable[[], ChildProcess], *, max_restarts: int) -> None:
        self.name = name
        self._start = start
        self._max_restarts = max_restarts
        self._process: ChildProcess | None = None
        self._started = self._due = 0.0
        self._num_failures = 0  # in a row
        self.exit_code: int | None = None
        """Exit code of its last end by itself; None while it runs."""
        self.has_given_up = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def supervise(self, now: float) -> bool:
        """Start it if that is due. Return whether it has ended since the last call; `exit_code` says how."""
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
        """End it and forget its failures: the next `supervise` starts it."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()
        self.exit_code, self._num_failures, self._due, self.has_given_up = None, 0, 0.0, False

    def _fail(self, now: float) -> None:
        self._num_failures = 1 if now - self._started > STEADY_SECONDS else self._num_failures + 1
        self.has_given_up = self._num_failures > self._max_restarts
        pause = min(2.0 ** (self._num_failures - 1), MAX_PAUSE_SECONDS)
        self._due = now + pause
        what = "given up (rollout.atropos.start.max_restarts)" if self.has_given_up else f"again in {pause:.0f} s"
        logger.warning("%s has ended with %d; %s", self.name, self.exit_code, what)
