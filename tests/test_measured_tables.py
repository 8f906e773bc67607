"""Does each row of the tables of measurements say which figures it is about, and a command that prints them?"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
HEADER = "| what | measured | figures | reproduce with |"
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted((ROOT / "parallm").rglob("*.md")))
    if HEADER in path.read_text()
]
KNOWN = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); import check_figures; print(json.dumps([*check_figures.BARS]))"
)
GOOD = ["engine, tokens/s", "2.1x", "`engine.cpu.vs_batchgenerator`", "`scripts/bench_engine.py --load-rounds 1`"]


@cache
def known_figures() -> frozenset[str]:
    done = subprocess.run([sys.executable, "-c", KNOWN, str(SCRIPTS)], capture_output=True, text=True, check=True)
    return frozenset(json.loads(done.stdout))


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all rows of such tables."""
    lines = iter(text.splitlines())
    for line in lines:
        if line == HEADER:
            assert set(next(lines)) == set("|-")
            for row in lines:
                if not row.startswith("|"):
                    break
                yield [cell.strip() for cell in row.strip("|").split("|")]


def faults(cells: Sequence[str]) -> list[str]:
    if len(cells) != 4:
        return [f"{len(cells)} cells"]
    figures, commands = (re.findall("`([^`]+)`", cell) for cell in cells[2:])
    if not figures or len(commands) != 1:
        return [f"{len(figures)} figures, {len(commands)} commands"]
    found = [f"check_figures.py does not know {name}" for name in figures if name not in known_figures()]
    text = source(commands[0])
    if text is None:
        return [*found, f"there is no {commands[0]}"]
    options = [word for word in commands[0].split() if word.startswith("--") and f'"{word}"' not in text]
    return [
        *found,
        *(f"{commands[0]} does not know {option}" for option in options),
        *(f"{commands[0]} does not print {name}" for name in figures if not prints(text, name)),
    ]


def source(command: str) -> str | None:
    """All code that can name the figures of a command; None where there is no such program."""
    program, *words = command.split()
    if command.startswith("python -m parallm.train +recipe="):
        recipe = ROOT / "recipes" / f"{words[2].removeprefix('+recipe=')}.yaml"
        prefix = yaml.safe_load(recipe.read_text())["metrics"]["figures"] if recipe.exists() else None
        summary = (ROOT / "parallm" / "metrics" / "summary.py").read_text()
        return summary.replace('f"{prefix}.{name}"', f'f"{prefix}.{{name}}"') if prefix else None
    path = ROOT / program
    return code_of(path) if program.startswith("scripts/") and path.is_file() else None


def code_of(path: Path, known: frozenset[Path] = frozenset()) -> str:
    """The text of a script and of the scripts that it imports."""
    text = path.read_text()
    for name in re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE):
        imported = SCRIPTS / f"{name}.py"
        if imported.exists() and imported not in known | {path}:
            text += code_of(imported, known | {path})
    return text


def prints(text: str, figure: str) -> bool:
    """Whether the code has the figure's name, or one whose other part is put in."""
    if f'"{figure}"' in text:
        return True
    start = figure.index(".") + 1
    halves = [(figure[:place], figure[place:]) for place in range(start, len(figure))]
    return any(f'"{begin}{{' in text or (f'"{begin}"' in text and f'}}{end}"' in text) for begin, end in halves if end)


def patterns() -> list[tuple[str, str]]:
    """Scripts of scripts/README.md with the patterns of their figures."""
    _, table = (SCRIPTS / "README.md").read_text().split("| script | figures |")
    rows_of_it = re.findall(r"^\| `(\S+)` \|(.*)\|$", table, flags=re.MULTILINE)
    return [(script, pattern) for script, cell in rows_of_it for pattern in re.findall("`([^`]+)`", cell)]


def scripts_of(figure: str) -> list[str]:
    return [script for script, pattern in patterns() if fnmatch(figure, pattern)]


def test_each_figure_with_a_bar_has_one_script_that_gives_it() -> None:
    assert {figure: found for figure in known_figures() if len(found := scripts_of(figure)) != 1} == {}


def test_a_script_names_the_figures_that_it_gives() -> None:
    for script, pattern in patterns():
        assert f'"{pattern.split(".")[0]}.' in code_of(SCRIPTS / script), f"{script} has no {pattern}"


def test_a_figure_of_no_script_is_found() -> None:
    assert scripts_of("nobody.figure") == []
    assert len(scripts_of("engine.soak.lost")) == 1


def test_three_documents_have_tables_at_least() -> None:
    folders = {str(Path(document).parent) for document in DOCUMENTS}
    assert {".", "parallm/engine", "parallm/learner"} <= folders


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_row_names_figures_and_a_command_that_prints_them(document: str) -> None:
    found = list(rows((ROOT / document).read_text()))
    assert found
    assert [fault for cells in found for fault in faults(cells)] == []


def test_a_row_that_is_in_order_has_no_faults() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("cell", "text", "fault"),
    [
        (2, "", "0 figures"),
        (2, "`engine.cpu.vs_nobody`", "does not know engine.cpu.vs_nobody"),
        (2, "`live.reward_gain`", "does not print live.reward_gain"),
        (3, "by hand", "0 commands"),
        (3, "`scripts/bench_engines.py`", "there is no scripts/bench_engines.py"),
        (3, "`scripts/bench_engine.py --fast`", "does not know --fast"),
        (3, "`python -m parallm.train +recipe=nothing`", "there is no python -m parallm.train"),
    ],
)
def test_a_row_that_is_not_in_order_is_found(cell: int, text: str, fault: str) -> None:
    assert any(fault in one for one in faults([*GOOD[:cell], text, *GOOD[cell + 1 :]]))
