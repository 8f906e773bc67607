"""A process that lives no longer than this one, with its output in a file."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")
SECONDS_TO_END = 10.0
"""More than the keeper's own patience."""


class KeptProcess:
    """Runs from its making on. Ctrl-C in our terminal does not reach it; the end of our process, of any kind, does."""

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str], log: Path) -> None:
        """Output is appended to `log`. Raises OSError where `folder` or `log` is not to be had."""
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), *command],
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
        code = self._keeper.poll()
        if code is not None:
            self._let_go()
        return code

    async def end(self) -> None:
        """Ask it to end, then make it, with all that it has started. Returns when it has."""
        self._let_go()
        try:
            await asyncio.to_thread(self._keeper.wait, SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            await asyncio.to_thread(self._keeper.wait)

    def _let_go(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()


def variables_for(python: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a program of `python`; another interpreter must not find our packages."""
    ours = dict(os.environ)
    if Path(python) != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME"):
            ours.pop(name, None)
    return ours | {"PYTHONUNBUFFERED": "1"} | dict(own)


def last_words(log: Path, number: int = 3) -> str:
    """The last lines of a log, in one line."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-number:])
    return ""
