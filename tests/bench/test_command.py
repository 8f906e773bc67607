"""`scripts/figures` says what falls short, is missing or crashed, and ends with 1 then. With made-up measurements."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bench.__main__ as command
import pytest
from bench import measurement
from bench.measurement import Bar, Figures, Measured, Measurement, Request

BARS = {
    "parity": {"parity.max_abs": Bar(max=1e-4)},
    "gsm8k": {"gsm8k.reward_last": Bar(min=0.5, needs="model")},
    "memory": {"memory.learner_over_base": Bar(max_figure="memory.bar"), "memory.speed": Bar()},
    "update": {"update.speed": Bar(min=1.3, needs="gpu")},
}
GOOD: dict[str, Figures] = {
    "parity": {"parity.max_abs": 1e-5},
    "memory": {"memory.learner_over_base": 0.09, "memory.bar": 0.11, "memory.speed": 2.4},
}
Run = Callable[..., tuple[int, dict[str, list[str]], dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; its exit code, the rows of its table by name, and its last line."""

    def run_with(
        figures: Mapping[str, Measured | None], *arguments: str, has_gpu: bool = False
    ) -> tuple[int, dict[str, list[str]], dict[str, Any]]:
        def measure(name: str) -> Callable[[Request], Measured]:
            def call(_: Request) -> Measured:
                found = figures.get(name, {})
                if found is None:
                    raise KeyError("a worker has crashed")
                return found

            return call

        needs = {"gsm8k": "model", "update": "gpu"}
        made = [
            Measurement(name=name, bars=bars, measure=measure(name), minutes=1, needs=needs.get(name, ""))
            for name, bars in BARS.items()
        ]
        monkeypatch.setattr(measurement, "MEASUREMENTS", made)
        monkeypatch.setattr(measurement, "has_gpu", lambda: has_gpu)
        monkeypatch.setattr("sys.argv", ["figures", *arguments])
        for variable in ("PARALLM_MODEL", "PARALLM_GSM8K", "PARALLM_CLONES"):
            monkeypatch.delenv(variable, raising=False)
        code = command.main()
        lines = capsys.readouterr().out.splitlines()
        if "Figures" not in lines:
            return code, {}, {}
        table = [line.split() for line in lines[lines.index("Figures") + 2 :] if line.startswith("  ")]
        return code, {row[0]: row[1:] for row in table}, json.loads(lines[-1])

    return run_with


def test_figures_that_meet_their_bars_end_with_zero(run: Run) -> None:
    code, table, line = run(GOOD)
    assert code == 0
    assert table["parity.max_abs"] == ["1e-05", "<=", "0.0001", "ok"]
    assert table["memory.learner_over_base"] == ["0.09", "<=", "0.11", "ok"]
    assert table["memory.speed"] == ["2.4"]
    assert line["figures"] == {name: value for found in GOOD.values() for name, value in found.items()}
    assert line["machine"]
    assert line["commit"]


@pytest.mark.parametrize(
    ("figures", "name", "words"),
    [
        ({"memory": {"memory.learner_over_base": 0.12, "memory.bar": 0.11}}, "memory.learner_over_base", "FALLS SHORT"),
        ({"parity": None}, "parity.max_abs", "NOT MEASURED"),
        ({"parity": {"parity.max_abs": None}}, "parity.max_abs", "NOT MEASURED"),
        ({"parity": {}}, "parity.max_abs", "NOT MEASURED"),
        ({"memory": {"memory.learner_over_base": 0.01}}, "memory.learner_over_base", "NOT MEASURED"),
    ],
)
def test_what_is_wrong_stands_in_the_table_and_ends_with_one(
    run: Run, figures: dict[str, Figures | None], name: str, words: str
) -> None:
    code, table, _ = run(GOOD | figures)
    assert (code, table[name][-2:]) == (1, words.split())
    assert len(table) == 3


def test_figures_about_a_model_are_measured_and_judged_with_a_model(run: Run, tmp_path: Path) -> None:
    given = (f"--model={tmp_path}", f"--data={tmp_path}")
    assert run(GOOD | {"gsm8k": {"gsm8k.reward_last": 0.6}}, *given)[0] == 0
    assert run(GOOD | {"gsm8k": {"gsm8k.reward_last": 0.4}}, *given)[0] == 1
    assert run(GOOD, *given)[0] == 1


def test_figures_about_a_gpu_are_measured_and_judged_where_there_is_one(run: Run) -> None:
    assert "update.speed" not in run(GOOD)[1]
    assert run(GOOD | {"update": {"update.speed": 1.4}}, has_gpu=True)[0] == 0
    code, table, _ = run(GOOD | {"update": {"update.speed": 1.2}}, has_gpu=True)
    assert (code, table["update.speed"]) == (1, ["1.2", ">=", "1.3", "FALLS", "SHORT"])


def test_figures_are_told_before_a_measurement_fails(run: Run) -> None:
    def some() -> Iterator[Figures]:
        yield {"memory.learner_over_base": 0.09, "memory.bar": 0.11}
        yield {"memory.learner_over_base": 0.1}
        raise KeyError("a worker has crashed")

    code, table, line = run({**GOOD, "memory": some()})
    assert code == 1
    assert table["memory.learner_over_base"] == ["0.1", "<=", "0.11", "ok"]
    assert table["memory.speed"] == ["-"]
    assert line["figures"] == {"parity.max_abs": 1e-5, "memory.learner_over_base": 0.1, "memory.bar": 0.11}


def test_prefixes_choose_the_figures(run: Run) -> None:
    code, table, _ = run(GOOD | {"parity": None}, "memory.learner")
    assert (code, list(table)) == (0, ["memory.learner_over_base"])
    assert list(run(GOOD, "parity.", "memory.speed")[1]) == ["parity.max_abs", "memory.speed"]


def test_a_prefix_of_nothing_ends_with_two(run: Run) -> None:
    assert run(GOOD, "memry")[0] == 2


def test_a_report_is_one_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    _, _, line = run(GOOD | {"parity": None}, f"--report={file}")
    text = file.read_text()
    assert "| memory.learner_over_base | 0.09 | <= 0.11 | ok |" in text
    assert "Failed: parity." in text
    assert json.dumps(line) in text


def test_every_figure_has_one_measurement_and_every_measurement_a_name() -> None:
    figures = [name for one in measurement.MEASUREMENTS for name in one.bars]
    assert len(figures) == len(set(figures)) > 150
    names = [one.name for one in measurement.MEASUREMENTS]
    assert len(names) == len(set(names))
