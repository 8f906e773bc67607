"""Whole supervised runs: they learn, save, resume, and leave what a run leaves."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import ConfigError, TrainingStopped
from parallm.metrics.curves import MetricsRow, Panel, panels_of
from parallm.metrics.log_capture import PROGRESS
from parallm.model.adapters.files import read_adapter
from parallm.reports import Evaluation
from parallm.trainer.evaluators import DemonstrationEvaluator
from parallm.types import Problem, Split

Train = Callable[..., int]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Every answer is the bare number, which the nano model never says by itself."""
    return bare_numbers(tmp_path / "data.jsonl", "train")


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    return bare_numbers(tmp_path / "held_out.jsonl", "test")


def bare_numbers(path: Path, split: Split) -> str:
    problems = Arithmetic(ArithmeticSettings(num_train=12, num_test=4)).problems(split)
    rows = [{"prompt": one.messages[0].content, "completion": f"#### {one.answer}"} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learner(data: str, **changes: Any) -> dict[str, Any]:
    return {"preset": "sft", "data": data, "learning_rate": 5e-3, "warmup_steps": 0} | changes


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name and name != "time"} for row in rows]


def test_a_supervised_run_learns_and_leaves_versions_metrics_and_held_out_losses(
    train: Train, data: str, held_out: str, tmp_path: Path
) -> None:
    trainer = {"steps": 6, "evaluate_problems": 3, "evaluate_every": 3}
    settings = learner(data, data_held_out=held_out)
    assert train(learner=settings, trainer=trainer, rollout={"problems_per_step": 4}) == 0
    rows, evaluations = rows_of(tmp_path / "run"), rows_of(tmp_path / "run", "evaluations.jsonl")
    assert rows[-1]["update/loss"] < 0.7 * rows[0]["update/loss"]
    assert [row["update/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not any(name.startswith(("reward", "groups", "parity", "offpolicy", "rollout")) for name in rows[0])
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert [row["heldout/demonstrations"] for row in evaluations] == [3, 3, 3]
    assert evaluations[-1]["heldout/loss"] < 0.7 * evaluations[0]["heldout/loss"]
    assert not any("accuracy" in name or "reward" in name for name in evaluations[0])
    assert read_adapter(tmp_path / "run" / "adapter").version == 6


def test_the_held_out_loss_is_on_the_screen_in_the_log_in_the_curves_and_in_the_summary(
    train: Train,
    data: str,
    held_out: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Panel] = []

    def panels(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> list[Panel]:
        drawn.extend(panels_of(steps, evaluations))
        return drawn

    monkeypatch.setattr("parallm.metrics.curves.panels_of", panels)
    caplog.set_level("INFO", logger=PROGRESS)
    settings = {"learner": learner(data, data_held_out=held_out), "metrics": {"display": "lines", "curves": True}}
    assert train(trainer={"steps": 2, "evaluate_problems": 4}, **settings) == 0
    before, after = (row["heldout/loss"] for row in rows_of(tmp_path / "run", "evaluations.jsonl"))
    lines = [f"evaluation at step 0: held-out loss {before:.2f} of 4", f"held-out loss after   {after:.2f}, 4 demonst"]
    for text in (capsys.readouterr().out, "\n".join(caplog.messages)):
        assert all(line in text for line in lines)
    (loss,) = (line for panel in drawn for line in panel.series if line.label == "held out")
    assert loss.points == ((0, before), (2, after))
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())["figures"]
    assert {value for name, value in figures.items() if name.endswith("heldout_loss_after")} == {after}


class Unasked(Arithmetic):
    """An environment whose problems nobody may ask."""

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        raise AssertionError("evaluated")


def test_an_environment_that_was_not_asked_for_is_not_played(
    train: Train, data: str, held_out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unasked: Any = Unasked(ArithmeticSettings(num_train=8, num_test=4))
    settings = learner(data, data_held_out=held_out)
    assert train(unasked, learner=settings, trainer={"steps": 1, "evaluate_problems": 4}) == 0
    assert "evaluated" not in caplog.text


def test_an_environment_that_was_asked_for_is_played_beside_the_loss(
    train: Train, data: str, held_out: str, tmp_path: Path
) -> None:
    trainer = {"steps": 1, "evaluate_problems": 4, "evaluate_on": "environment"}
    assert train(learner=learner(data, data_held_out=held_out), trainer=trainer) == 0
    for row in rows_of(tmp_path / "run", "evaluations.jsonl"):
        assert (row["heldout/demonstrations"], row["heldout/problems"]) == (4, 4)
        assert row["heldout/loss"] > 0
    assert len(rows_of(tmp_path / "run", "evaluation_samples.jsonl")) == 8


def test_data_is_held_out_of_the_file_itself_unless_nothing_is_evaluated(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{number} + 1?", "completion": "!"} for number in range(60)]
    data = tmp_path / "many.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"learner": learner(str(data)), "metrics": {"display": "lines"}}
    assert train(trainer={"steps": 1, "evaluate_problems": 512}, **settings) == 0
    (before, _) = rows_of(tmp_path / "run", "evaluations.jsonl")
    assert 2 <= before["heldout/demonstrations"] <= 12
    assert f"of {before['heldout/demonstrations']} demonstrations" in capsys.readouterr().out
    assert train(folder="all", trainer={"steps": 1, "evaluate_problems": 0}, **settings) == 0
    assert not (tmp_path / "all" / "evaluations.jsonl").exists()


def found_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Let the evaluations of a run find these losses, one after the other."""
    rest, evaluate = iter(losses), DemonstrationEvaluator.evaluate

    async def evaluated(self: DemonstrationEvaluator, *arguments: Any) -> Evaluation:
        evaluation = await evaluate(self, *arguments)
        return replace(evaluation, report=replace(evaluation.report, loss=next(rest)))

    monkeypatch.setattr(DemonstrationEvaluator, "evaluate", evaluated)


def test_the_best_version_is_that_of_the_lowest_loss(
    train: Train, data: str, held_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_losses(monkeypatch, 3.0, 2.0, 1.0, 1.5, 1.7)
    trainer = {"steps": 9, "evaluate_problems": 4, "evaluate_every": 1, "patience": 2, "keep_best": True}
    train(learner=learner(data, data_held_out=held_out), trainer=trainer)
    assert [row["heldout/loss"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [3.0, 2.0, 1.0, 1.5, 1.7]
    assert read_adapter(tmp_path / "run" / "adapter").version == 2
    assert find_adapter(str(tmp_path / "run")).parent.name == "step_000002"


def test_a_resumed_run_says_with_which_loss_its_best_version_is_gone(
    train: Train, data: str, held_out: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found_losses(monkeypatch, 3.0, 1.0, 2.0, 1.5)
    for steps in (2, 3):
        trainer = {"steps": steps, "evaluate_problems": 4, "evaluate_every": 1}
        settings = learner(data, data_held_out=held_out)
        train(learner=settings, trainer=trainer, checkpoint={"resume": "auto", "every": 100})
    gone = "version 1, the best so far with a loss of 1.000, was not saved; the best is version 2 now"
    assert gone in caplog.messages


def test_keys_that_change_nothing_in_a_supervised_run_are_named(
    train: Train, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(learner=learner(data), trainer={"steps": 1}, rollout={"temperature": 0.7}) == 0
    assert "rollout.temperature=0.7 has no effect with learner=sft" in caplog.messages


def test_a_resumed_run_is_the_same_run(train: Train, data: str, tmp_path: Path) -> None:
    settings = {"learner": learner(data), "rollout": {"problems_per_step": 5}}
    train(folder="whole", trainer={"steps": 4}, **settings)
    train(folder="parts", trainer={"steps": 2}, **settings)
    train(folder="parts", trainer={"steps": 4}, checkpoint={"resume": "auto"}, **settings)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    hashes = {read_adapter(tmp_path / folder / "adapter").digest for folder in ("whole", "parts")}
    assert len(hashes) == 1


def test_a_learning_rate_that_breaks_the_weights_is_rolled_back_twice_and_then_stops_the_run(
    train: Train, data: str, tmp_path: Path
) -> None:
    """The first update makes weights of 1e30: finite, but what is computed with them is not."""
    with pytest.raises(TrainingStopped, match=r"3 steps in a row changed nothing, .*2 roll-backs have not helped"):
        train(learner=learner(data, learning_rate=1e30), trainer={"steps": 30}, checkpoint={"keep": 30})
    rows = rows_of(tmp_path / "run")
    assert [row["guard/rollbacks"] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert [row["guard/skipped"] for row in rows] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9]
    good = read_adapter(tmp_path / "run" / "step_000004" / "adapter")
    assert all(float(abs(array).max()) == 0 for name, array in good.arrays.items() if name.endswith("lora_b"))


def test_a_gradient_that_is_not_finite_costs_one_step_and_its_demonstrations_are_kept(
    train: Train, data: str, tmp_path: Path, break_gradient: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    break_gradient(2)
    settings: dict[str, Any] = {"rollout": {"problems_per_step": 3}, "checkpoint": {"keep": 9}}
    assert train(learner=learner(data, micro_batch_tokens=4096), trainer={"steps": 3}, **settings) == 0
    first, second, third = (read_adapter(tmp_path / "run" / f"step_00000{step}" / "adapter") for step in (1, 2, 3))
    assert first.digest == second.digest != third.digest
    assert [row["guard/skipped"] for row in rows_of(tmp_path / "run")] == [0, 1, 1]
    assert rows_of(tmp_path / "run")[2]["guard/skipped_gradient"] == 1
    assert "step 2: nothing was changed: the gradient is not finite" in caplog.text
    faults = [json.loads(line) for line in (tmp_path / "run" / "faults" / "step_2.jsonl").read_text().splitlines()]
    assert [row["fault"] for row in faults] == ["gradient"] * 3
    assert all(row["text"].startswith("#### ") for row in faults)


def test_a_resumed_run_remembers_its_faults(train: Train, data: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learner": learner(data, learning_rate=1e30), "checkpoint": {"resume": "auto"}}
    train(trainer={"steps": 3}, **settings)
    train(trainer={"steps": 4}, **settings)
    rows = rows_of(tmp_path / "run")
    assert [(row["guard/skipped"], row["guard/rollbacks"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1)]


def test_training_ends_when_patience_is_over_and_says_so(
    train: Train, data: str, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {"steps": 9, "evaluate_problems": 4, "evaluate_every": 1, "patience": 2}
    settings = learner(data, learning_rate=0, data_held_out=held_out)
    assert train(learner=settings, trainer=trainer, metrics={"display": "lines"}) == 0
    assert len(rows_of(tmp_path / "run")) == 2  # there is no new version, so nothing that could be better than the base
    assert "training ends after step 2: the last 2 evaluations were no better" in capsys.readouterr().out


def test_clients_wait_for_a_version_whose_loss_is_low_enough(
    train: Train, data: str, held_out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = {"steps": 2, "evaluate_problems": 4, "evaluate_every": 1, "publish_if": "evaluation", "publish_margin": 0}
    settings = learner(data, learning_rate=1.0, data_held_out=held_out)  # which makes the model worse
    assert train(learner=settings, trainer=trainer) == 0
    assert "version 1 is not served: its held-out loss is" in caplog.text


def test_a_run_without_data_is_refused_before_the_model_loads(train: Train) -> None:
    with pytest.raises(ConfigError, match=r"learner\.data: must be given"):
        train(learner={"preset": "sft"}, model={"path": "nobody/nothing"})
