"""Does a check that fails, or lacks something, count as what it is? With made-up checks and no server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"

PROBE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import check_atropos
from atropos_checks.stage import Finding, NotHere, expect

def right(bench):
    return Finding(remark="well", figures={"ledger_join_fraction": 1.0, "itl_p50_ratio": 1.5})

def other(bench):
    return Finding(remark="well", figures={"ledger_join_fraction": 0.5, "itl_p50_ratio": 1.25})

def wrong(bench):
    expect(1 + 1 == 3, "of course")

def absent(bench):
    raise NotHere("needs a model")

check_atropos.plain_python = lambda *_: sys.executable
check_atropos.CHECKS = dict(enumerate((right, other, wrong, absent), start=1))
sys.exit(check_atropos.main())
"""


def check(*options: str) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])["figures"]


def test_a_check_that_fails_is_counted_and_ends_with_one() -> None:
    code, told, figures = check()
    assert code == 1
    assert "AssertionError: of course" in told
    assert (figures["atropos.checks_passed"], figures["atropos.checks_total"]) == (2, 3)
    assert figures["atropos.checks_failed"] == 1


def test_the_worst_figure_of_all_checks_counts_and_what_was_not_run_does_not() -> None:
    code, _, figures = check("--only", "1", "2", "4")
    assert code == 0
    assert (figures["atropos.checks_passed"], figures["atropos.checks_total"]) == (2, 2)
    assert (figures["atropos.ledger_join_fraction"], figures["atropos.itl_p50_ratio"]) == (0.5, 1.5)
    assert "atropos.reward_gain" not in figures
