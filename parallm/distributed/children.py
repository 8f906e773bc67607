"""Processes that a command starts on this machine, and that stop when it is gone. Imports no MLX.

All have the reading end of one pipe. The command alone has the writing end, and never writes: the pipe ends with the
command, also where that is killed. `interrupts.obey_starter` waits for it.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from parallm.interrupts import STARTER


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with these variables beside those of this one. Raises OSError."""
    pipe = _pipe()
    return subprocess.Popen(command, env={**os.environ, **environment, STARTER: str(pipe)}, pass_fds=[pipe])


@cache
def _pipe() -> int:
    """Return the reading end; the writing end stays open until this process ends."""
    reading, _ = os.pipe()
    return reading
