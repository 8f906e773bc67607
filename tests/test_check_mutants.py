"""The list of mistakes that tests must notice: is each still one of the code, and does the check tell them apart?"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROBE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import check_mutants
from mutants import Mutant

TESTS = ("tests/metrics/test_formatting.py",)
change = dict(file="parallm/metrics/formatting.py", old='MISSING = "-"', tests=TESTS)
check_mutants.HARMLESS = Mutant(name="harmless", new='MISSING = "-"  # nothing', **change)
noticed, overlooked = Mutant(name="noticed", new='MISSING = "+"', **change), Mutant(
    name="overlooked", file="parallm/learner/loss/kl.py", old="0.5 *", new="0.7 *", tests=TESTS
)
gone = Mutant(name="gone", file="parallm/learner/loss/kl.py", old="no such text", new="", tests=TESTS)
check_mutants.MUTANTS = {"all": (noticed, overlooked), "gone": (noticed, gone)}[sys.argv.pop(1)]
sys.exit(check_mutants.main())
"""


def check(chosen: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), chosen]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_mutant_is_a_change_of_the_code_as_it_is() -> None:
    done = subprocess.run([sys.executable, SCRIPTS / "check_mutants.py", "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 30


@pytest.mark.slow
def test_what_the_tests_overlook_fails_the_check() -> None:
    done = check("all")
    assert done.returncode == 1
    assert '"mutants.tried": 2, "mutants.survived": 1' in done.stdout
    assert "SURVIVED" in next(line for line in done.stdout.splitlines() if "overlooked" in line)


def test_a_mutant_whose_text_is_gone_fails_the_check_before_any_test_runs() -> None:
    done = check("gone")
    assert done.returncode == 1
    assert "gone: parallm/learner/loss/kl.py holds 0 times 'no such text'" in done.stderr
    assert done.stdout == ""
