"""Logs that are rotated, by their writer and by others."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallm.log_files import LogFile

ROOT = Path(__file__).parent.parent
WRITER = """
import logging, signal, sys
from parallm import interrupts
from parallm.log_files import LogFile
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
if sys.argv[2] == "outlives":
    interrupts.outlive_hang_up()
logger = logging.getLogger("x")
logger.addHandler(LogFile(sys.argv[1]))
for line in sys.stdin:
    logger.error(line.strip())
    print("written", flush=True)
"""


@contextmanager
def written(path: Path, max_bytes: int | None = None) -> Iterator[logging.Logger]:
    logger, handler = logging.getLogger(f"test.{path}"), LogFile(path, max_bytes)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


def test_a_file_that_is_full_moves_on_and_three_older_ones_stay(tmp_path: Path) -> None:
    with written(tmp_path / "log", 10) as logger:
        for number in range(7):
            logger.error("%d bytes long", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert [(tmp_path / f"log.{age}").read_text()[0] for age in (1, 2, 3)] == ["6", "5", "4"]
    assert (tmp_path / "log").read_text() == ""


def test_a_file_without_a_limit_grows(tmp_path: Path) -> None:
    with written(tmp_path / "log") as logger:
        for number in range(7):
            logger.error("%d bytes long", number)
    assert len((tmp_path / "log").read_text().splitlines()) == 7


@pytest.mark.parametrize("kind", ["outlives", "control"])
def test_a_process_without_a_terminal_outlives_a_hang_up_and_writes_to_the_new_file(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(log), kind],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer:
        for number in range(2):
            writer.stdin.write(f"line {number}\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "written\n"
            if number == 0:
                log.rename(tmp_path / "log.1")
                writer.send_signal(signal.SIGHUP)
                if kind == "control":
                    assert writer.wait(20) == -signal.SIGHUP
                    return
        writer.stdin.close()
    assert log.read_text() == "line 1\n"
    assert (tmp_path / "log.1").read_text() == "line 0\n"
