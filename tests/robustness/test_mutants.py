"""The tests notice mistakes: each of mutants.txt is made in a copy of the tree, and must fail the tests that it names.

First the tests run on the copy as it is, and with a change that no test can notice: both must pass.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.measurement import request_of_tests

ROOT = Path(__file__).parents[2]
SECONDS_FOR_TESTS = 300
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
"""A line of pytest's summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def is_possible(self, root: Path = ROOT) -> bool:
        """Whether its lines stand exactly once in its file."""
        file = root / self.file
        return file.is_file() and file.read_text().count(self.old) == 1


def read_mutants(text: str) -> list[Mutant]:
    """The first one is harmless."""
    mutants = []
    for block in text.split("\n= ")[1:]:
        name, where, *lines = block.splitlines()
        file, *tests = where.split()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] == sign) for sign in "-+")
        mutants.append(Mutant(name=name, file=file, tests=tuple(tests), old=old, new=new))
    return mutants


HARMLESS, *MUTANTS = read_mutants(Path(__file__).with_name("mutants.txt").read_text())


def test_every_mutant_is_a_change_of_the_code_as_it_is() -> None:
    assert [mutant.name for mutant in (HARMLESS, *MUTANTS) if not mutant.is_possible()] == []
    assert len(MUTANTS) >= 30


def test_a_mutant_whose_lines_are_gone_is_not_possible() -> None:
    (gone,) = read_mutants("\n= gone\nparallm/types.py tests/x.py\n-no such text\n+another\n")
    assert (gone.old, gone.new, gone.tests) == ("no such text\n", "another\n", ("tests/x.py",))
    assert not gone.is_possible()


@pytest.mark.robustness
def test_mistakes_fail_the_tests_that_should_notice_them(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    copy = copy_tree(tmp_path / "tree")
    where = run_python(copy, "-c", "import parallm; print(parallm.__file__)").stdout.strip()
    assert Path(where).is_relative_to(copy), f"the tests would import {where}, not the copy"
    mutants = [one for one in MUTANTS if "checkpoint" in one.name] if request_of_tests().is_quick else MUTANTS
    named = {test for mutant in mutants for test in mutant.tests}
    assert (
        run_tests(copy, sorted(test for test in named if "::" not in test or test.partition("::")[0] not in named))
        == ""
    )
    assert noticed_by(copy, HARMLESS) == "", "what is noticed says nothing"
    survivors = []
    for mutant in mutants:
        test = noticed_by(copy, mutant)
        print(f"{mutant.name}: {test or 'SURVIVED'}", flush=True)
        if not test:
            survivors.append(mutant.name)
    record_property("mutants.tried", len(mutants))
    record_property("mutants.survived", len(survivors))
    assert survivors == []


def copy_tree(copy: Path) -> Path:
    """The files of the checkout that git knows or would know."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def noticed_by(copy: Path, mutant: Mutant) -> str:
    """The first test that fails; empty if none does."""
    file = copy / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        return run_tests(copy, mutant.tests)
    finally:
        file.write_text(original)


def run_tests(copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails; empty if none does. Tests that hang have noticed something."""
    # what other runs of pytest have left in the usual place must not fail these
    temporary = tempfile.mkdtemp(dir=copy.parent)
    try:
        done = run_python(copy, "-m", "pytest", "-q", "-x", f"--basetemp={temporary}/tests", *tests)
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS_FOR_TESTS} s"
    failed = FAILURE.search(done.stdout)
    assert done.returncode == 0 or failed, f"pytest ends with {done.returncode}:\n{done.stdout}{done.stderr}"
    return failed[1].partition("::")[2] if failed else ""


def run_python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # files are rewritten within the second that cached bytecode tells apart
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_FOR_TESTS
    )
