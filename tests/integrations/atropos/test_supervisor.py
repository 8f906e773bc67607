"""A process that ends is started again, later each time, up to a bound."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from parallm.integrations.atropos.supervisor import SupervisedProcess, variables_for

FOREVER = "import time; print('begun', flush=True); time.sleep(100)"


def supervised(tmp_path: Path, code: str, max_restarts: int) -> SupervisedProcess:
    command, variables = [sys.executable, "-c", code], variables_for(sys.executable, {})
    log = tmp_path / "log"
    return SupervisedProcess("one", command, folder=tmp_path, variables=variables, log=log, max_restarts=max_restarts)


def wait_for_end(one: SupervisedProcess, now: float) -> None:
    deadline = time.monotonic() + 20
    while not one.supervise(now):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_fails_is_started_again_until_it_is_given_up(tmp_path: Path) -> None:
    one = supervised(tmp_path, "raise SystemExit(3)", max_restarts=1)
    one.supervise(0)
    wait_for_end(one, 0)
    assert (one.exit_code, one.has_given_up) == (3, False)
    one.supervise(0.5)
    assert not one.is_running  # a second has to pass
    one.supervise(1.0)
    wait_for_end(one, 1.0)
    assert one.has_given_up
    one.supervise(1000.0)
    assert not one.is_running


def test_a_process_that_lived_long_enough_begins_anew_with_its_restarts(tmp_path: Path) -> None:
    one = supervised(tmp_path, "raise SystemExit(3)", max_restarts=1)
    for now in (0.0, 100.0, 200.0, 300.0):
        one.supervise(now)
        wait_for_end(one, now + 90)
    assert not one.has_given_up
    one.supervise(400.0)
    wait_for_end(one, 401.0)
    assert one.has_given_up


def test_a_process_that_ends_well_is_not_started_again(tmp_path: Path) -> None:
    one = supervised(tmp_path, "pass", max_restarts=3)
    one.supervise(0)
    wait_for_end(one, 0)
    one.supervise(1000.0)
    assert (one.exit_code, one.is_running) == (0, False)


def test_a_process_that_was_ended_is_started_again_and_counts_no_failure(tmp_path: Path) -> None:
    one = supervised(tmp_path, FOREVER, max_restarts=0)
    one.supervise(0)
    asyncio.run(one.end())
    assert (one.is_running, one.exit_code, one.has_given_up) == (False, None, False)
    one.supervise(0)
    assert one.is_running
    asyncio.run(one.end())


def test_what_a_process_says_is_in_its_log(tmp_path: Path) -> None:
    one = supervised(tmp_path, "print('first'); raise SystemExit('last')", max_restarts=0)
    one.supervise(0)
    wait_for_end(one, 0)
    assert one.log_tail() == "first | last"


def test_a_program_of_another_interpreter_does_not_find_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert variables_for(sys.executable, {})["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in variables_for("/other/python", {})
    assert variables_for("/other/python", {"PYTHONPATH": "/theirs"})["PYTHONPATH"] == "/theirs"
