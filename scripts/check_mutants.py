"""Do the tests notice mistakes? Each of scripts/mutants.py is made in a copy of the tree, and must fail its tests.

First the tests run on the copy as it is, and with a change that nothing can notice: both must pass. A text that is not
in its file exactly once, or tests that cannot run, end the script with 1, so that the list stays true.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import HARMLESS, MUTANTS, Mutant
from report import print_figures, print_table

ROOT = Path(__file__).parent.parent
SECONDS_FOR_TESTS = 300
PASSED, FAILED = 0, 1
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
"""Of pytest's summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    name: str
    noticed_by: str
    """The first test that failed; empty if none did."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What pytest says."""

    code: int
    output: str
    failed: str = ""
    """The test that ended it."""


class CannotRun(Exception):
    """Nothing was found out."""


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="try the mutants whose names hold this text")
    parser.add_argument("--list", action="store_true", help="show the names and check the texts, without running tests")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if (arguments.only or "") in mutant.name]
    missing = [problem for mutant in (HARMLESS, *chosen) if (problem := text_problem(mutant))]
    if missing or not chosen:
        print(*(missing or [f"no mutant's name holds {arguments.only!r}"]), sep="\n", file=sys.stderr)
        return 1
    if arguments.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = copy_tree(Path(folder))
        try:
            check_controls(copy, chosen)
            trials = [try_mutant(copy, mutant) for mutant in chosen]
        except CannotRun as error:
            print(error, file=sys.stderr)
            return 1
    survivors = [trial.name for trial in trials if not trial.noticed_by]
    rows = [(trial.name, trial.noticed_by or "SURVIVED", f"{trial.seconds:.0f} s") for trial in trials]
    print_table("Mutants", rows)
    print_figures({"mutants.tried": len(trials), "mutants.survived": len(survivors)})
    return 1 if survivors else 0


def text_problem(mutant: Mutant) -> str:
    """Why the mutant cannot be made; empty if it can."""
    file = ROOT / mutant.file
    count = file.read_text().count(mutant.old) if file.is_file() else 0
    return "" if count == 1 else f"{mutant.name}: {mutant.file} holds {count} times {mutant.old!r}"


def copy_tree(folder: Path) -> Path:
    """The files of the checkout that git knows or would know, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    copy = folder / "tree"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def check_controls(copy: Path, chosen: Sequence[Mutant]) -> None:
    """Raise CannotRun unless the tests pass, and pass with a change that they cannot notice."""
    where = run_python(copy, "-c", "import parallm; print(parallm.__file__)").stdout.strip()
    if not Path(where).is_relative_to(copy):
        raise CannotRun(f"the tests would import {where}, not the copy in {copy}")
    named = {test for mutant in chosen for test in mutant.tests}
    tests = sorted(test for test in named if test.partition("::")[0] == test or test.partition("::")[0] not in named)
    done = run_tests(copy, tests)
    if done.code != PASSED:
        raise CannotRun(f"{done.output}\nwithout any mutant pytest ends with {done.code}")
    print(f"without any mutant all tests pass: {done.output.splitlines()[-1]}", flush=True)
    if try_mutant(copy, HARMLESS).noticed_by:
        raise CannotRun(f"{HARMLESS.name} was noticed, so what is noticed says nothing")


def try_mutant(copy: Path, mutant: Mutant) -> Trial:
    """Raises CannotRun if its tests cannot run."""
    file = copy / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    began = time.perf_counter()
    try:
        done = run_tests(copy, mutant.tests)
    finally:
        file.write_text(original)
    if done.code != PASSED and not done.failed:
        raise CannotRun(f"{done.output}\n{mutant.name}: pytest ends with {done.code}, and no test has failed")
    trial = Trial(name=mutant.name, noticed_by=done.failed, seconds=time.perf_counter() - began)
    print(f"{trial.seconds:4.0f} s  {trial.name}: {trial.noticed_by or 'SURVIVED'}", flush=True)
    return trial


def run_tests(copy: Path, tests: Sequence[str]) -> Done:
    """Tests that hang have noticed something."""
    # what other runs of pytest have left in the usual place must not fail these
    temporary = tempfile.mkdtemp(dir=copy.parent)
    try:
        done = run_python(copy, "-m", "pytest", "-q", "-x", f"--basetemp={temporary}/tests", *tests)
    except subprocess.TimeoutExpired:
        return Done(code=FAILED, output="", failed=f"no end after {SECONDS_FOR_TESTS} s")
    named = FAILURE.search(done.stdout)
    output = (done.stdout + done.stderr).strip()
    return Done(code=done.returncode, output=output, failed=named[1].partition("::")[2] if named else "")


def run_python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # files are rewritten within the second that cached bytecode tells apart
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_FOR_TESTS
    )


if __name__ == "__main__":
    sys.exit(main())
