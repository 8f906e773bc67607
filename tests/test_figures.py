"""Does the table of all figures say what is wrong, and does its script end with 1 then? With made-up measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"

# The real script, with three measurements of which one may crash.
PROBE = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
import check_figures

figures = json.loads(sys.argv.pop(1))
check_figures.has_gpu = lambda: "update" in figures

def crash():
    raise KeyError("figures")

check_figures.BARS = {
    "parity.max_abs": check_figures.Bar(most=1e-4),
    "gsm8k.reward_last": check_figures.Bar(least=0.5, needs_model=True),
    "memory.learner_over_base": check_figures.Bar(most_figure="memory.bar"),
    "learner.speed": check_figures.Bar(),
    "update.speed": check_figures.Bar(least=1.3, needs_gpu=True),
}
check_figures.measurements = lambda *_: {
    name: crash if found is None else (lambda found=found: found) for name, found in figures.items()
}
sys.exit(check_figures.main())
"""
GOOD: dict[str, Any] = {
    "parity": {"parity.max_abs": 1e-5},
    "memory": {"memory.learner_over_base": 0.09, "memory.bar": 0.11},
    "learner": {"learner.speed": 2.4},
}


def judge(figures: dict[str, Any], *options: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and the rows of the table by the figure's name."""
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), json.dumps(figures), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARALLM_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    table = done.stdout.partition("Figures\n")[2].splitlines()
    return done.returncode, {line.split()[0]: line.split()[1:] for line in table if line.startswith("  ")}


def test_figures_that_meet_their_bars_end_with_zero() -> None:
    code, table = judge(GOOD)
    assert code == 0
    assert table["parity.max_abs"] == ["1e-05", "<=", "0.0001", "ok"]
    assert table["memory.learner_over_base"] == ["0.09", "<=", "0.11", "ok"]
    assert table["learner.speed"] == ["2.4"]
    assert table["gsm8k.reward_last"] == ["-", ">=", "0.5", "not", "judged", "here"]


def test_a_figure_that_falls_short_ends_with_one() -> None:
    code, table = judge(GOOD | {"memory": {"memory.learner_over_base": 0.12, "memory.bar": 0.11}})
    assert (code, table["memory.learner_over_base"]) == (1, ["0.12", "<=", "0.11", "FALLS", "SHORT"])


def test_a_script_that_crashes_ends_with_one_and_the_others_stand_in_the_table() -> None:
    code, table = judge(GOOD | {"parity": None})
    assert code == 1
    assert table["parity.max_abs"] == ["-", "<=", "0.0001", "NOT", "MEASURED"]
    assert table["memory.learner_over_base"][-1] == "ok"


def test_a_figure_that_a_script_leaves_out_ends_with_one() -> None:
    code, table = judge(GOOD | {"parity": {"parity.max_abs": None}})
    assert (code, table["parity.max_abs"][-2:]) == (1, ["NOT", "MEASURED"])


def test_a_figure_whose_bar_is_unknown_ends_with_one() -> None:
    assert judge(GOOD | {"memory": {"memory.learner_over_base": 0.01}})[0] == 1


def test_figures_about_a_model_are_judged_with_a_model(tmp_path: Path) -> None:
    given = (f"--model={tmp_path}", f"--data={tmp_path}")
    assert judge(GOOD | {"gsm8k": {"gsm8k.reward_last": 0.6}}, *given)[0] == 0
    assert judge(GOOD | {"gsm8k": {"gsm8k.reward_last": 0.4}}, *given)[0] == 1
    assert judge(GOOD, *given)[0] == 1


def test_figures_about_a_gpu_are_judged_where_there_is_one() -> None:
    code, table = judge(GOOD)
    assert (code, table["update.speed"][-3:]) == (0, ["not", "judged", "here"])
    assert judge(GOOD | {"update": {"update.speed": 1.4}})[0] == 0
    code, table = judge(GOOD | {"update": {"update.speed": 1.2}})
    assert (code, table["update.speed"]) == (1, ["1.2", ">=", "1.3", "FALLS", "SHORT"])
    code, table = judge(GOOD | {"update": {}})
    assert (code, table["update.speed"][-2:]) == (1, ["NOT", "MEASURED"])


def test_only_some_measurements_are_judged_alone() -> None:
    code, table = judge(GOOD | {"parity": None}, "--only", "memory")
    assert (code, table["parity.max_abs"][-3:]) == (0, ["not", "judged", "here"])
    assert judge(GOOD, "--only", "memry")[0] == 2
