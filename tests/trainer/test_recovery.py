"""Faults put into whole runs: the run goes on, nothing of the faulty steps is learned, and everything is said."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ConfigError, TrainingStopped
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter
from parallm.reports import Estimate, Evaluation, EvaluationReport
from parallm.rollout.episode import Episode, trajectory_of
from parallm.rollout.evaluation import Evaluator, Progress
from parallm.trainer.recovery import write_faults
from parallm.types import FaultyEpisode, Message, Problem, Trajectory, TrajectoryGroup

Train = Callable[..., int]
PLAIN = {"refill_rounds": 0}  # 2 problems x 4 completions: step N scores completions 8 N - 7 to 8 N


NAN_LATER, INF_LATER = -1e6, -2e6
"""Scores that become a sampled log-prob of NaN, and a reward of infinity behind the check of scores."""


@pytest.fixture(autouse=True)
def broken_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(episode: Episode, *, reward: float, **fields: Any) -> Trajectory:
        if reward == NAN_LATER:
            whole = trajectory_of(episode, reward=0.25 + episode.index / 8, **fields)
            return replace(whole, logprobs=(math.nan,) * len(whole.tokens))
        return trajectory_of(episode, reward=math.inf if reward == INF_LATER else reward, **fields)

    monkeypatch.setattr("parallm.rollout.collector.trajectory_of", broken)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def adapter_after(folder: Path, step: int) -> Adapter:
    return read_adapter(folder / f"step_{step:06d}" / "adapter")


def test_after_three_faults_in_a_row_the_newest_update_is_undone_and_training_goes_on(
    train: Train, calling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = calling(lambda: NAN_LATER, 17, 25, 33)  # in steps 3, 4 and 5
    assert train(faults, rollout=PLAIN, trainer={"steps": 7}, checkpoint={"keep": 9}) == 0
    folder = tmp_path / "run"
    assert [row["guard/skipped"] for row in rows_of(folder)] == [0, 0, 1, 2, 3, 3, 3]
    assert [row["guard/rollbacks"] for row in rows_of(folder)] == [0, 0, 0, 0, 1, 1, 1]
    assert rows_of(folder)[6]["guard/skipped_behaviour"] == 3
    adapters = [adapter_after(folder, step) for step in (1, 2, 3, 4, 5, 7)]
    assert adapters[1].digest == adapters[2].digest == adapters[3].digest
    assert adapters[4].digest == adapters[0].digest
    assert [(one.version, one.parent) for one in adapters] == [(1, 0), (2, 1), (2, 1), (2, 1), (3, 1), (4, 3)]
    assert "step 5: rolled back from version 2 to the weights of version 1, which are version 3 now" in caplog.text


def test_after_a_roll_back_nothing_is_trained_that_the_undone_version_has_sampled_ahead(
    train: Train, calling: Any, tmp_path: Path
) -> None:
    faults = calling(lambda: NAN_LATER, *range(17, 49))  # in steps 3, 4 and 5, and in others as they are sampled ahead
    assert train(faults, rollout=PLAIN, trainer={"steps": 14, "max_off_policy_steps": 2}) == 0
    rows = rows_of(tmp_path / "run")
    undone = next(row["step"] for row in rows if row["guard/rollbacks"] == 1)
    after = [row for row in rows if row["step"] > undone]
    assert after[0]["offpolicy/lag_max"] == 0
    assert all(row["offpolicy/dropped"] == 0 for row in after)
    assert any(row["update/skipped"] is None for row in after)


def test_faults_that_roll_backs_do_not_cure_stop_the_run(train: Train, calling: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match=r"3 steps in a row changed nothing.*2 roll-backs have not helped"):
        train(calling(lambda: NAN_LATER, *range(1, 999)), rollout=PLAIN, trainer={"steps": 20})
    rows = rows_of(tmp_path / "run")
    assert [row["guard/rollbacks"] for row in rows] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert (tmp_path / "run" / "step_000009").is_dir()


def test_the_trajectories_to_blame_are_kept_with_everything_that_is_known_of_them(
    train: Train, calling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(calling(lambda: INF_LATER, 10, 14), rollout=PLAIN, trainer={"steps": 2})
    folder = tmp_path / "run" / "faults"
    assert [file.name for file in folder.iterdir()] == ["step_2.jsonl"]
    rows = [json.loads(line) for line in (folder / "step_2.jsonl").read_text().splitlines()]
    assert [(row["fault"], row["reason"]) for row in rows] == [("reward", "reward inf")] * 2
    assert all(row["group_rewards"][row["index"]] is None for row in rows), rows
    assert rows_of(tmp_path / "run")[1]["update/skipped"] is None
    assert "step 2: 2 completions were left out of training, whose rewards float32 cannot hold (problem " in caplog.text
    first = rows[0]
    assert first["reward"] is None
    assert first["reward_parts"] == {"even": INF_LATER}
    assert len(first["tokens"]) == len(first["logprobs"]) == len(first["loss_mask"]) > 0
    assert first["weight_versions"][0]["version"] == 1
    assert first["prompt"][0]["role"] == "user"
    assert len(first["group_rewards"]) == 4
    assert "text" in first


def test_a_run_whose_rewards_are_no_numbers_ends_without_a_roll_back(
    train: Train, calling: Any, tmp_path: Path
) -> None:
    idle = PLAIN | {"max_idle_steps": 4}
    with pytest.raises(
        TrainingStopped, match=r"in 4 steps .* one nothing was changed: no reward is a number that float32"
    ):
        train(calling(lambda: INF_LATER, *range(9, 99)), rollout=idle, trainer={"steps": 9})
    rows = rows_of(tmp_path / "run")
    assert [row["guard/skipped"] for row in rows] == [0, 1, 2, 3, 4]
    assert {row["guard/rollbacks"] for row in rows} == {0}


def test_completions_that_could_not_be_scored_are_kept_too(
    train: Train, calling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> float:
        raise ValueError("no number")

    assert train(calling(fail, 2, *range(9, 17)), rollout=PLAIN, trainer={"steps": 2}) == 0
    folder = tmp_path / "run" / "faults"
    rows = [[json.loads(line) for line in (folder / f"step_{step}.jsonl").read_text().splitlines()] for step in (1, 2)]
    assert [len(step) for step in rows] == [1, 8]
    assert {(row["fault"], row["reason"]) for step in rows for row in step} == {
        ("score_raised", "ValueError('no number')")
    }
    (first,) = rows[0]
    assert f'File "{__file__}", line ' in first["traceback"]
    assert ["traceback" in row for row in rows[1]] == [True] + [False] * 7
    assert first["prompt"][0]["role"] == "user"
    assert first["problem_id"].startswith("arithmetic-train-")
    assert len(first["tokens"]) > 0
    assert f"step 1: the trajectories to blame are in {folder / 'step_1.jsonl'}" in caplog.text


def test_an_environment_that_always_fails_does_not_fill_the_disk(tmp_path: Path) -> None:
    problem = Problem(problem_id="p", messages=(Message(role="user", content="2 + 2?"),), answer="4")
    faulty = tuple(
        FaultyEpisode(kind=kind, detail="", text="5", tokens=(5,))
        for kind in ("score_raised", "reply_raised")
        for _ in range(20)
    )
    groups = [TrajectoryGroup(problem=problem, trajectories=(), faulty=faulty)]
    file = write_faults(tmp_path, 3, update=None, trained=(), sampled=groups)
    assert file == tmp_path / "faults" / "step_3.jsonl"
    assert len(file.read_text().splitlines()) == 32
    assert write_faults(tmp_path, 4, update=None, trained=(), sampled=()) is None


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_run_goes_on(
    train: Train, tmp_path: Path, break_gradient: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    break_gradient(2)
    settings: dict[str, Any] = {"rollout": PLAIN, "trainer": {"steps": 3}, "checkpoint": {"keep": 9}}
    assert train(learner={"micro_batch_tokens": 4096}, **settings) == 0
    first, second, third = (adapter_after(tmp_path / "run", step) for step in (1, 2, 3))
    assert first.digest == second.digest != third.digest
    assert rows_of(tmp_path / "run")[2]["guard/skipped_gradient"] == 1
    assert "step 2: nothing was changed: the gradient is not finite" in caplog.text


def test_an_update_that_ruins_the_policy_is_undone_and_when_it_ruins_it_again_the_run_stops(
    train: Train, calling: Any, tmp_path: Path
) -> None:
    """Weights of 1e30 are finite; what is sampled with them is not."""
    halves = itertools.cycle([0.0, 1.0])
    with pytest.raises(TrainingStopped, match="2 roll-backs have not helped"):
        train(
            calling(lambda: next(halves), *range(1, 999)),
            rollout=PLAIN,
            trainer={"steps": 20},
            learner={"learning_rate": 1e30},
            checkpoint={"keep": 20},
        )
    folder = tmp_path / "run"
    good = adapter_after(folder, 4)
    assert good.parent == 0
    assert all(float(abs(array).max()) == 0 for name, array in good.arrays.items() if name.endswith("lora_b"))
    assert [row["guard/rollbacks"] for row in rows_of(folder)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    kinds = {key for key in rows_of(folder)[-1] if key.startswith("guard/skipped_")}
    assert kinds == {"guard/skipped_behaviour"}


def accuracies(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    left = iter(values)

    async def evaluate(self: Evaluator, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        assert model == "latest"
        report = EvaluationReport(
            step=step,
            version=version,
            num_problems=4,
            accuracy=next(left),
            low=0.0,
            high=1.0,
            reward=Estimate(0.0, 0.0, 0.0),
        )
        return Evaluation(report=report)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)


GATE = {"steps": 4, "evaluate_problems": 4, "evaluate_every": 1, "publish_if": "evaluation", "publish_margin": 0.1}


def test_clients_get_a_version_once_an_evaluation_has_found_it_good_enough(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accuracies(monkeypatch, 0.5, 0.3, 0.45, 0.9, 0.75)
    assert train(trainer=GATE, checkpoint={"keep": 9}) == 0
    assert "version 1 is not served: its held-out accuracy is 30.0%, the best was 50.0%" in caplog.text
    assert "(trainer.publish_margin=0.1); policy stays the base" in caplog.text
    assert "version 4 is not served: its held-out accuracy is 75.0%, the best was 90.0%" in caplog.text
    assert read_adapter(tmp_path / "run" / "adapter").digest == adapter_after(tmp_path / "run", 3).digest
    assert {row["step"] for row in rows_of(tmp_path / "run")} == {1, 2, 3, 4}


def test_a_resumed_run_serves_what_was_served_before(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies(monkeypatch, 0.5, 0.6, 0.9, 0.3, 0.4)
    train(trainer=GATE | {"steps": 3}, checkpoint={"resume": "auto"})
    train(trainer=GATE, checkpoint={"resume": "auto"})
    assert read_adapter(tmp_path / "run" / "adapter").version == 2


def test_what_an_evaluation_decides_needs_evaluations(train: Train) -> None:
    with pytest.raises(ConfigError, match=r"publish_if=evaluation go by evaluations, and this run has none"):
        train(trainer={"publish_if": "evaluation"})
