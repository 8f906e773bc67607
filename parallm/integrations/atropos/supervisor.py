"""A process that lives no longer than this one, with its output in a file."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

WATCHDOG = Path(__file__).with_name("keeper.py")
SECONDS_TO_END = 10.0
"""More than the keeper's own patience."""


class ChildProcess:
    """Runs from its making on. Ctrl-C in our terminal does not reach it; the end of our process, of any kind, does."""

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str], log: Path) -> None:
        """Output is appended to `log`. Raises OSError where `folder` or `log` is not to be had."""
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
        """None: it runs. As a shell tells it: 128 + N after signal N."""
        code = self._watchdog.poll()
        if code is not None:
            self._let_go()
        return code

    async def end(self) -> None:
        """Ask it to end, then make it, with all that it has started. Returns when it has."""
        self._let_go()
        try:
            await asyncio.to_thread(self._watchdog.wait, SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            await asyncio.to_thread(self._watchdog.wait)

    def _let_go(self) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()


def variables_for(python: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a program of `python`; another interpreter must not find our packages."""
    ours = dict(os.environ)
    if Path(python) != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME"):
            ours.pop(name, None)
    return ours | {"PYTHONUNBUFFERED": "1"} | dict(own)


def log_tail(log: Path, number: int = 3) -> str:
    """The last lines of a log, in one line."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-number:])
    return ""


STEADY_SECONDS = 60.0
"""Who has lived so long begins anew with its restarts."""
MAX_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class SupervisedProcess:
    """Nothing runs until `supervise` is called, which is to be called often."""

    def __init__(self, name: str, start: Callable[[], ChildProcess], *, max_restarts: int) -> None:
        self.name = name
        self._start = start
        self._max_restarts = max_restarts
        self._process: ChildProcess | None = None
        self._started = self._due = 0.0
        self._num_failures = 0  # in a row
        self.exit_code: int | None = None
        """Of its last end by itself; None while it runs."""
        self.has_given_up = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def supervise(self, now: float) -> bool:
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
