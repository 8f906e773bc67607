"""Ctrl-C and SIGTERM: the first signal asks to stop, the second ends the process at once. For the asyncio thread.

In a process that a command has started the second one does nothing: a terminal sends Ctrl-C to both, and the command
sends it on. The command kills the process after a second signal of its own.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
STANDARD_OUTPUT = 1
TERMINAL = "/dev/tty"
STARTER = "PARALLM_STARTER"
"""Environment variable: the file descriptor of a pipe that ends with the process that has started this one."""

Result = TypeVar("Result")

_has_starter = threading.Event()


def stop_on_signals(stop: Callable[[], None], what: str) -> None:
    """Call `stop` at the first signal, after a warning that says `what` happens."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _leave_now)
        logger.warning("%s; press Ctrl-C again to leave now", what)
        stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)


def outlive_hang_up() -> None:
    """Let SIGHUP do nothing in a process without a terminal, where a supervisor sends it after it has moved logs.

    Log files notice that by themselves. With a terminal it still means that this is gone.
    """
    with suppress(OSError):
        os.close(os.open(TERMINAL, os.O_RDONLY))
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def show_cursor() -> None:
    """Show the cursor of the terminal again, in a new line: a live display that was cut off has hidden it."""
    if os.isatty(STANDARD_OUTPUT):  # not through sys.stdout, which a display replaces, and whose locks may be held
        os.write(STANDARD_OUTPUT, f"{SHOW_CURSOR}\n".encode())


def obey_starter() -> None:
    """Leave it to the process that has started this one to count signals, if that one has set `STARTER`.

    This process gets SIGTERM once that one is gone.
    """
    descriptor = os.environ.pop(STARTER, None)  # not for the children of this process
    if descriptor is not None:
        _has_starter.set()
        threading.Thread(target=_wait_for_starter, args=(int(descriptor),), daemon=True).start()


def were_received() -> bool:
    """Whether a signal has asked this process to stop."""
    return any(signal.getsignal(number) is _leave_now for number in SIGNALS)


async def until_signal(work: Coroutine[Any, Any, Result] | None = None) -> Result | None:
    """Wait for the first signal; or for `work`, if that ends first, and return its result."""
    over = asyncio.Event()
    stop_on_signals(over.set, "finishing the answers under way, then leaving")
    if work is not None:
        return await unless(over, work)
    await over.wait()
    return None


async def unless(over: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of `work`; or None if `over` is set first, after `work` was cancelled and has ended."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.wait((task, waiter))


def _wait_for_starter(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _leave_now(_: int, __: object) -> None:
    if _has_starter.is_set():
        return
    show_cursor()
    os._exit(INTERRUPTED)
