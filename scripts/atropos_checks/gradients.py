"""Check 5: the gradient of hand-made groups, by the tests that write the objective out token by token."""

import re
import sys

from job import SCRIPTS, clean_environment, run_program

from atropos_checks.stage import Bench, Finding, expect

TESTS = SCRIPTS.parent / "tests" / "trainer" / "test_atropos_gradients.py"
CONTROL = "test_the_clip_of_the_example_trainer_gives_another_gradient"


def loss_parity(bench: Bench) -> Finding:
    """In a process of its own; the control is one of the tests."""
    expect(CONTROL in TESTS.read_text(), "the control: no test of an inverted clip")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    told = run_program(command, clean_environment() | {"TMPDIR": str(bench.folder)}, SCRIPTS.parent)
    passed = re.search(r"(\d+) passed", told)
    expect(passed and "skipped" not in told, told[-300:])
    return Finding(remark=f"{passed[1] if passed else 0} tests of gradients, an inverted clip among them")
