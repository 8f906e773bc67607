import asyncio
import os
import pty
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from parallm.interrupts import INTERRUPTED, STARTER, unless


@pytest.mark.parametrize("name", ["train", "serve", "evaluate", "export", "front"])
def test_ctrl_c_while_a_command_starts_shows_no_traceback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("parallm.run.command.run_command", interrupted)
    with pytest.raises(SystemExit) as ending:
        runpy.run_module(f"parallm.{name}", run_name="__main__")
    assert ending.value.code == INTERRUPTED


def test_work_that_ends_in_time_gives_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def main() -> int | None:
        return await unless(asyncio.Event(), work())

    assert asyncio.run(main()) == 7


def test_work_is_cancelled_and_has_ended_when_the_event_is_set() -> None:
    ends: list[str] = []

    async def work() -> int:
        try:
            await asyncio.sleep(60)
            return 7
        finally:
            await asyncio.sleep(0)  # cleaning up may take its time
            ends.append("cleaned up")

    async def main() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, over.set)
        assert await unless(over, work()) is None
        assert ends == ["cleaned up"]

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    async def main() -> None:
        await unless(asyncio.Event(), work())

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())


INTERRUPTED_TWICE = """
import asyncio, os, signal, sys, threading
from parallm.interrupts import stop_on_signals
from parallm.metrics.live_display import LiveDisplay
from parallm.metrics.display import RunHeader

display = LiveDisplay(sys.stdout)
display.start(RunHeader(name="run", model="nano", device="CPU", blas="", url=None))
is_held = threading.Event()

def hold() -> None:
    with display._live._lock:
        is_held.set()
        threading.Event().wait()

async def main() -> None:
    over = asyncio.Event()
    stop_on_signals(over.set, "stopping")
    os.kill(os.getpid(), signal.SIGINT)
    await over.wait()
    threading.Thread(target=hold, daemon=True).start()
    is_held.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

asyncio.run(main())
"""
"""The second signal comes while another thread draws."""


def test_two_interrupts_leave_a_terminal_at_once_with_its_cursor_on_a_new_line() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm"}
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    try:
        assert process.wait(30) == 130
        shown = os.read(ours, 1 << 16).decode()
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert "stopping; press Ctrl-C again to leave now" in shown
    assert shown.endswith("\x1b[?25h\r\n")


STARTED = """
import asyncio, os, signal
from parallm.interrupts import obey_starter, stop_on_signals

async def main() -> None:
    over = asyncio.Event()
    stop_on_signals(over.set, "stopping")
    print("ready", flush=True)
    await over.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    print("saved", flush=True)

obey_starter()
asyncio.run(main())
"""
"""Ends after its first signal; further ones come while it does."""


def test_a_process_with_a_starter_stops_when_that_is_gone_and_does_not_count_signals() -> None:
    reading, writing = os.pipe()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), STARTER: str(reading)}
    command = [sys.executable, "-c", STARTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, pass_fds=[reading]) as process:
        os.close(reading)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.close(writing)
        assert process.stdout.read() == b"saved\n"
        assert process.wait(30) == 0
