"""Lets a process end only after a thread that computes with MLX.

MLX frees what it has compiled in a thread as the thread ends, after Python has joined it. That needs the interpreter:
without it the process aborts.
"""

import atexit
import threading
import time
from pathlib import Path

END_SECONDS = 5.0
POLL_SECONDS = 0.001


def end_before_process() -> None:
    """Let the process wait at its end for the present thread, up to `END_SECONDS`; on Linux, elsewhere not at all."""
    atexit.register(_wait, Path(f"/proc/self/task/{threading.get_native_id()}"))


def _wait(task: Path) -> None:
    last = time.monotonic() + END_SECONDS
    while task.exists() and time.monotonic() < last:
        time.sleep(POLL_SECONDS)
