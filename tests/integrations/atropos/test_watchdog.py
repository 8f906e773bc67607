"""Processes that a run has started end with it, however it ends, and with all that they have started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from parallm.integrations.atropos.supervisor import WATCHDOG

# Ignores SIGTERM, and has a child of its own
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(100)
"""
QUICK = STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "")
# A run that starts a watchdog and is killed
RUN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(100)
"""


def wait_for_processes(file: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (file.exists() and len(file.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


def are_gone(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(one) for one in processes):
            return True
        time.sleep(0.02)
    return False


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/status")  # an orphan may not be reaped yet
        return not status.exists() or "State:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):  # it may end while its status is read
        return False


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    words = [str(WATCHDOG), sys.executable, "-c", QUICK, str(file)]
    with subprocess.Popen([sys.executable, "-c", RUN, *words]) as run:
        processes = wait_for_processes(file)
        run.send_signal(signal.SIGKILL)
    assert are_gone(processes, 5)


def test_a_process_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    words = [sys.executable, str(WATCHDOG), sys.executable, "-c", STUBBORN, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as watchdog:
        processes = wait_for_processes(file)
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        assert watchdog.wait(20) == 128 + signal.SIGKILL
    assert are_gone(processes, 5)


def test_a_process_that_is_killed_leaves_no_child_of_its_own_behind(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    words = [sys.executable, str(WATCHDOG), sys.executable, "-c", QUICK, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as watchdog:
        processes = wait_for_processes(file)
        os.kill(processes[0], signal.SIGKILL)
        assert watchdog.wait(20) == 128 + signal.SIGKILL
    assert are_gone(processes, 5)
