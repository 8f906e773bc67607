"""Does a client whose worker fails or crashes count as failed? With made-up workers and no server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

PROBE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import check_clients
from report import print_figures

client = check_clients.Client(name="some", worker=sys.argv[2], requirements=("some==1",))
outcome = check_clients.ask(client, sys.executable, [], Path.cwd())
print(outcome.failed)
print_figures(check_clients.figures_of([outcome]))
"""
CHECKS = """
import sys
sys.path.insert(0, {clients!r})
from checking import expect, report

def sums():
    expect(1 + 1 == 2)

def {name}():
    expect(1 + 1 == {value}, "of course")

report("pytest", [sums, {name}])
"""


def figures_of(worker: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """What went wrong, and the figures."""
    file = folder / "worker.py"
    file.write_text(worker)
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    failed, figures = done.stdout.splitlines()
    return failed, json.loads(figures)["figures"]


@pytest.mark.parametrize(("value", "num_failed"), [(2, 0), (3, 1)])
def test_each_check_of_a_client_counts(value: int, num_failed: int, tmp_path: Path) -> None:
    worker = CHECKS.format(clients=str(SCRIPTS / "workers" / "clients"), name="wonders", value=value)
    failed, figures = figures_of(worker, tmp_path)
    assert figures == {"clients.passed": 2 - num_failed, "clients.total": 2, "clients.failed": num_failed}
    assert ("wonders: AssertionError: of course" in failed) == bool(num_failed)


def test_a_worker_that_crashes_is_a_check_that_failed(tmp_path: Path) -> None:
    failed, figures = figures_of("print('[]'); raise SystemExit('no such package')", tmp_path)
    assert figures == {"clients.passed": 0, "clients.total": 1, "clients.failed": 1}
    assert "ended with 1: no such package" in failed
