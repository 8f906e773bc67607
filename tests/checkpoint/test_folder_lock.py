"""One process at a time in a folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallm.checkpoint.folder_lock import LOCK, FolderLock, folder_locked
from parallm.errors import FolderInUse

HOLD = """
import os, sys, time
from pathlib import Path
from parallm.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
{then}
print("locked", flush=True)
time.sleep(60)
"""
FORK = """
begun, begins = os.pipe()
child = os.fork()
if child == 0:
    os.write(begins, b"!")
    time.sleep(60)
os.read(begun, 1)
Path(sys.argv[1], "child").write_text(str(child))
"""


@contextmanager
def another_process(folder: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """One that has locked the folder and done what `then` says."""
    script = textwrap.dedent(HOLD).replace("{then}", then)
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_second_process_is_told_which_one_has_the_folder(tmp_path: Path) -> None:
    with another_process(tmp_path) as process, pytest.raises(FolderInUse, match=f"is in use by process {process.pid}$"):
        FolderLock(tmp_path)


def test_the_lock_ends_with_a_process_that_is_killed_and_its_file_locks_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK).read_text() == str(process.pid)
    with folder_locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())


def test_a_child_that_outlives_a_killed_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    with another_process(tmp_path, FORK) as process:
        process.kill()
        process.wait()
        child = int((tmp_path / "child").read_text())
        try:
            with folder_locked(tmp_path):
                os.kill(child, 0)  # is alive
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_was_locked_leaves_nothing_behind_and_can_be_locked_again(tmp_path: Path) -> None:
    for _ in range(2):
        with folder_locked(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
            FolderLock(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_removes_in_the_meantime_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removals = fcntl.flock, iter([True])

    def removed(descriptor: int, operation: int) -> None:
        if next(removals, False):
            (tmp_path / LOCK).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed)
    with folder_locked(tmp_path), pytest.raises(FolderInUse):
        FolderLock(tmp_path)


def test_a_disk_that_knows_no_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder_locked(tmp_path):
        assert "cannot be locked (No locks available): let no second process use it" in caplog.text
