"""The files that a run leaves in its folder."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from parallm.metrics.json_lines import read_rows
from parallm.metrics.live_run import LiveRun
from parallm.metrics.news import News
from parallm.metrics.record import RunRecorder
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluatedCompletion, EvaluationReport
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan

MakeStep = Callable[..., StepMetrics]
MakeEvaluation = Callable[..., EvaluationReport]
OFF = MetricsSettings(curves=False)
TRAJECTORY = Trajectory(
    problem_id="p",
    prompt_tokens=(1,),
    tokens=(2, 3),
    loss_mask=(True, True),
    logprobs=(-1.0, -1.0),
    temperature=1.0,
    weight_versions=(WeightSpan(version=6, start=0, end=2),),
    reward_parts={"correct": 1.0},
    reward=1.0,
    text="#### 5",
    finish_reason="stop",
)


def group(name: str, size: int) -> TrajectoryGroup:
    problem = Problem(problem_id=name, messages=(Message(role="user", content=f"ask {name}"),), answer="5")
    return TrajectoryGroup(
        problem=problem,
        trajectories=tuple(replace(TRAJECTORY, problem_id=name, text=f"{name}{i}") for i in range(size)),
    )


def steps_in(folder: Path, name: str) -> list[int]:
    return [row["step"] for row in read_rows(folder / name)]


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path: Path, step: MakeStep) -> None:
    RunRecorder(tmp_path, OFF, {}).step(step(1, reward_mean=math.nan))
    assert read_rows(tmp_path / "metrics.jsonl")[0]["reward/mean"] is None


def test_lost_steps_count_in_no_summary_though_no_step_follows(
    tmp_path: Path, step: MakeStep, evaluation: MakeEvaluation
) -> None:
    killed = RunRecorder(tmp_path, OFF, {})
    killed.evaluation(evaluation(0))
    for number in (1, 2, 3):
        killed.step(step(number), [group("a", 1)])
    killed.evaluation(evaluation(3))
    after = RunRecorder(tmp_path, OFF, {})
    after.go_on_after(2)
    assert after.finish("run").figures("run")["run.steps"] == 2
    assert steps_in(tmp_path, "samples.jsonl") == [1, 2]
    assert steps_in(tmp_path, "evaluations.jsonl") == [0]


def test_samples_come_from_as_many_problems_as_possible(tmp_path: Path, step: MakeStep) -> None:
    RunRecorder(tmp_path, MetricsSettings(samples_per_step=3), {}).step(step(7), [group("a", 2), group("b", 2)])
    rows = read_rows(tmp_path / "samples.jsonl")
    assert [row["completion"] for row in rows] == ["a0", "b0", "a1"]
    assert rows[0] == {
        "step": 7,
        "time": pytest.approx(time.time(), abs=60),
        "problem_id": "a",
        "messages": [{"role": "user", "content": "ask a"}],
        "prompt": "ask a",
        "completion": "a0",
        "answer": "5",
        "reward": 1.0,
        "parts": {"correct": 1.0},
        "version": 6,
        "finish_reason": "stop",
        "num_tokens": 2,
        "num_trained_tokens": 2,
    }


def test_a_resumed_run_has_each_step_once(tmp_path: Path, step: MakeStep, evaluation: MakeEvaluation) -> None:
    recorder = RunRecorder(tmp_path, OFF, {})
    recorder.evaluation(evaluation(0))
    for number in range(1, 8):
        recorder.step(step(number), [group("a", 1)])
    recorder.evaluation(evaluation(7))
    resumed = RunRecorder(tmp_path, OFF, {})
    resumed.step(step(5, reward_mean=0.75), [group("b", 1)])
    resumed.step(step(6), [group("b", 1)])
    assert steps_in(tmp_path, "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert read_rows(tmp_path / "metrics.jsonl")[4]["reward/mean"] == 0.75
    assert [row["problem_id"] for row in read_rows(tmp_path / "samples.jsonl")] == ["a"] * 4 + ["b"] * 2
    assert steps_in(tmp_path, "evaluations.jsonl") == [0]


def test_an_evaluation_made_just_before_the_first_step_stays(
    tmp_path: Path, step: MakeStep, evaluation: MakeEvaluation
) -> None:
    recorder = RunRecorder(tmp_path, OFF, {})
    recorder.evaluation(evaluation(0))
    recorder.step(step(1))
    assert steps_in(tmp_path, "evaluations.jsonl") == [0]


def test_an_evaluation_of_the_same_step_is_replaced(tmp_path: Path, evaluation: MakeEvaluation) -> None:
    recorder = RunRecorder(tmp_path, OFF, {})
    recorder.evaluation(evaluation(20, accuracy=0.5))
    recorder.evaluation(evaluation(20, accuracy=0.6))
    assert [row["heldout/accuracy"] for row in read_rows(tmp_path / "evaluations.jsonl")] == [0.6]


def test_the_summary_covers_the_run_from_its_beginning(
    tmp_path: Path, step: MakeStep, evaluation: MakeEvaluation
) -> None:
    first = RunRecorder(tmp_path, OFF, {})
    first.evaluation(evaluation(0))
    first.step(step(1))
    resumed = RunRecorder(tmp_path, OFF, {})
    resumed.step(step(2, reward_mean=0.5))
    resumed.evaluation(evaluation(2, accuracy=0.9, low=0.88, high=0.92))
    resumed.finish("quickstart", device="some device")
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written["figures"]["quickstart.accuracy_before"] == 0.31
    assert written["figures"]["quickstart.accuracy_after"] == 0.9
    assert written["figures"]["quickstart.train_seconds"] == 8.0
    assert written["machine"].endswith("some device")
    assert written["commit"]
    assert (written["first_step"]["step"], written["last_step"]["step"]) == (1, 2)


@pytest.mark.parametrize("curves", [True, False])
def test_a_run_that_ends_before_its_first_step_still_leaves_a_summary(tmp_path: Path, curves: bool) -> None:
    summary = RunRecorder(tmp_path, MetricsSettings(curves=curves), {}).finish("run")
    assert summary.rows()
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["figures"]["run.steps"] == 0
    assert (tmp_path / "curves.png").is_file() == curves


def test_a_failing_wandb_is_reported_once_and_costs_nothing(
    tmp_path: Path, step: MakeStep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no service")

    monkeypatch.setattr("wandb.init", refuse)
    with caplog.at_level(logging.WARNING):
        recorder = RunRecorder(tmp_path, MetricsSettings(wandb="offline"), {})
        recorder.start()
        recorder.step(step(1))
        recorder.finish("run")
    assert ["no service" in record.message for record in caplog.records] == [True]
    assert steps_in(tmp_path, "metrics.jsonl") == [1]


def test_wandb_gets_finite_numbers_and_one_id_per_folder(
    tmp_path: Path, step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, object]] = []
    ids: list[object] = []

    class Run:
        summary: ClassVar[dict[str, object]] = {}

        def define_metric(self, *_: object, **__: object) -> None: ...

        def log(self, row: dict[str, object]) -> None:
            logged.append(row)

        def finish(self) -> None: ...

    def init(**options: object) -> Run:
        ids.append(options["id"])
        return Run()

    monkeypatch.setattr("wandb.init", init)
    for number in (1, 2):
        recorder = RunRecorder(tmp_path, MetricsSettings(wandb="offline"), {"seed": 0})
        recorder.start()
        recorder.step(step(number, reward_std=math.nan))
        recorder.finish("run")
    assert [row["step"] for row in logged] == [1, 2]
    assert "reward/std" not in logged[0]
    assert len(set(ids)) == 1
    assert Run.summary["run.steps"] == 2


def completion(problem: str) -> EvaluatedCompletion:
    return EvaluatedCompletion(
        problem_id=problem,
        prompt="2 + 3",
        completion="5",
        answer="5",
        is_correct=True,
        reward=1.0,
        parts={"correct": 1.0},
        finish_reason="stop",
        num_tokens=1,
    )


def test_the_first_completions_of_each_evaluation_are_kept(tmp_path: Path, evaluation: MakeEvaluation) -> None:
    recorder = RunRecorder(tmp_path, replace(OFF, samples_per_evaluation=2), {})
    for step in (0, 5):
        recorder.evaluation(evaluation(step, version=step), [completion(name) for name in "abc"])
    rows = read_rows(tmp_path / "evaluation_samples.jsonl")
    assert [(row["step"], row["version"], row["problem_id"]) for row in rows] == [
        *((0, 0, name) for name in "ab"),
        *((5, 5, name) for name in "ab"),
    ]
    assert (rows[0]["completion"], rows[0]["parts"], rows[0]["is_correct"]) == ("5", {"correct": 1.0}, True)


def test_a_resumed_run_replaces_the_completions_of_a_repeated_evaluation(
    tmp_path: Path, evaluation: MakeEvaluation, step: MakeStep
) -> None:
    recorder = RunRecorder(tmp_path, OFF, {})
    for number in (0, 5):
        recorder.evaluation(evaluation(number), [completion("a")])
    again = RunRecorder(tmp_path, OFF, {})
    again.step(step(3))
    again.evaluation(evaluation(5), [completion("b")])
    rows = read_rows(tmp_path / "evaluation_samples.jsonl")
    assert [(row["step"], row["problem_id"]) for row in rows] == [(0, "a"), (5, "b")]


def test_an_evaluation_without_completions_leaves_no_file_of_them(tmp_path: Path, evaluation: MakeEvaluation) -> None:
    RunRecorder(tmp_path, OFF, {}).evaluation(evaluation(0))
    assert not (tmp_path / "evaluation_samples.jsonl").exists()


def test_every_row_has_the_time_and_a_watched_run_the_same_rows(
    tmp_path: Path, step: MakeStep, evaluation: MakeEvaluation
) -> None:
    recorder = RunRecorder(tmp_path, OFF, {})
    recorder.live = LiveRun("policy", News(), None)
    recorder.step(step(1), [group("a", 2)])
    recorder.evaluation(evaluation(1))
    (row,), (evaluated,) = read_rows(tmp_path / "metrics.jsonl"), read_rows(tmp_path / "evaluations.jsonl")
    assert row["time"] == read_rows(tmp_path / "samples.jsonl")[0]["time"] == pytest.approx(time.time(), abs=60)
    assert list(row)[:2] == ["step", "time"]
    assert evaluated["time"] >= row["time"]
    assert recorder.live.evaluations == [evaluated]
    assert recorder.live.history.last_row["time"] == row["time"]
    again = LiveRun("policy", News(), None)
    again.load(tmp_path)
    assert again.history.last_row == recorder.live.history.last_row
    assert again.evaluations == recorder.live.evaluations
    again.go_on_after(0)
    assert (len(again.history), again.evaluations) == (0, [])
