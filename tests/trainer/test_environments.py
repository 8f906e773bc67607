"""Whole runs with environments of several turns, with a judge, and with several environments at once."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.environment.arithmetic import Arithmetic, Calculator
from parallm.environment.environment import Ask
from parallm.environment.settings import ArithmeticSettings, CalculatorSettings, MixedPart, MixedSettings
from parallm.learner.learner import Learner
from parallm.run.training_data import build_environment
from parallm.types import Message, Problem, Split, TrajectoryGroup

Train = Callable[..., int]
FEW = ArithmeticSettings(num_train=32, num_test=8)


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows without what the clock says."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key and key != "time"} for row in rows]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrajectoryGroup]:
    """The groups that the learner gets, as they come."""
    found: list[TrajectoryGroup] = []
    update = Learner.update

    def watched(learner: Learner, groups: Sequence[TrajectoryGroup], **options: Any) -> Any:
        found.extend(groups)
        return update(learner, groups, **options)

    monkeypatch.setattr(Learner, "update", watched)
    return found


def test_the_nano_model_trains_with_a_calculator(train: Train, trained: list[TrajectoryGroup], tmp_path: Path) -> None:
    calculator = Calculator(CalculatorSettings(problems=FEW))
    rollout = {"problems_per_step": 4, "group_size": 8, "max_tokens": 48, "temperature": 1.0}
    assert train(calculator, rollout=rollout, trainer={"steps": 2, "evaluate_problems": 8}) == 0
    rows = rows_of(tmp_path / "run")
    assert [(row["update/skipped"], row["faults/total"]) for row in rows] == [(None, 0), (None, 0)]
    assert all(row["reward_part/calls"] > 1 for row in rows)
    assert rows_of(tmp_path / "run", "evaluations.jsonl")[0]["heldout_part/calls"] > 1
    if load_blas(DeviceSettings()).strict:
        assert [row["parity/bit_equal_fraction"] for row in rows] == [1.0, 1.0]


def test_a_trajectory_with_a_calculator_holds_its_results_unlearned(
    train: Train, trained: list[TrajectoryGroup]
) -> None:
    train(Calculator(CalculatorSettings(problems=FEW)), rollout={"max_tokens": 48}, trainer={"steps": 2})
    trajectories = [one for group in trained for one in group.trajectories]
    replied = [one for one in trajectories if not all(one.loss_mask)]
    assert len(replied) > len(trajectories) / 2
    for one in trajectories:
        sampled = {place for span in one.weight_versions for place in range(span.start, span.end)}
        assert sampled == {place for place, mask in enumerate(one.loss_mask) if mask}
        assert all((logprob == 0) != mask or mask for logprob, mask in zip(one.logprobs, one.loss_mask, strict=True))
        for line in one.text.split("\n"):
            sum_, equals, result = line.partition(" = ")
            if equals and all(part.isdigit() for part in sum_.split(" ")[::2]) and result:
                first, sign, second = sum_.split(" ")
                right = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second))
                assert result.startswith(str(right))


def test_a_run_with_a_calculator_goes_on_as_if_nothing_had_been(train: Train, tmp_path: Path) -> None:
    auto = {"resume": "auto"}
    for steps in (1, 3):
        train(Calculator(CalculatorSettings(problems=FEW)), trainer={"steps": steps}, checkpoint=auto)
    train(Calculator(CalculatorSettings(problems=FEW)), folder="whole", trainer={"steps": 3})
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "whole", name)


@pytest.mark.parametrize(("coefficient", "ahead"), [(0.0, 0), (0.1, 0), (0.1, 1)])
def test_groups_without_signal_are_trained_on_where_kl_to_the_base_acts_on_them(
    train: Train, trained: list[TrajectoryGroup], tmp_path: Path, coefficient: float, ahead: int
) -> None:
    settings = {"learner": {"kl_coefficient": coefficient}, "rollout": {"problems_per_step": 6, "group_size": 2}}
    train(trainer={"steps": 2, "max_off_policy_steps": ahead}, **settings)
    rows = rows_of(tmp_path / "run")
    sampled, with_signal = (sum(row[f"groups/{name}"] for row in rows) for name in ("sampled", "with_signal"))
    assert with_signal < sampled
    assert len(trained) == (sampled if coefficient else with_signal)
    assert {group.has_signal for group in trained} == ({True, False} if coefficient else {True})


@pytest.mark.parametrize("advantage", ["batch_std", "reinforce_pp", "reinforce_pp_baseline", "reward"])
def test_groups_without_signal_are_trained_on_where_the_advantage_is_not_of_the_group(
    train: Train, trained: list[TrajectoryGroup], tmp_path: Path, advantage: str
) -> None:
    rollout = {"problems_per_step": 6, "group_size": 2}
    train(trainer={"steps": 2}, learner={"advantage": advantage}, rollout=rollout)
    assert len(trained) == sum(row["groups/sampled"] for row in rows_of(tmp_path / "run"))
    assert {group.has_signal for group in trained} == {True, False}


class Judged:
    """Asks the base what it thinks of each completion; an even number of letters is praise."""

    weights: Mapping[str, float] = {"even": 1.0}

    def __init__(self) -> None:
        self.answers: list[str] = []

    def problems(self, split: Split) -> Sequence[Problem]:
        return Arithmetic(FEW).problems(split)

    def connect(self, ask: Ask) -> None:
        self._ask = ask

    async def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        answer = await self._ask([*problem.messages, Message(role="user", content=text)], max_tokens=8)
        self.answers.append(answer)
        return {"even": float(len(answer + text) % 2 == 0)}


def test_the_served_base_judges_completions(train: Train, tmp_path: Path) -> None:
    for folder in ("run", "again"):
        judged = Judged()
        assert train(judged, folder=folder, rollout={"refill_rounds": 0}, trainer={"steps": 2}) == 0
        assert len(judged.answers) == 16
        assert any(judged.answers)
    assert [row["faults/total"] for row in rows_of(tmp_path / "run")] == [0, 0]
    assert rows_of(tmp_path / "run", "samples.jsonl") == rows_of(tmp_path / "again", "samples.jsonl")


def test_mixed_environments_have_metrics_of_their_own(train: Train, tmp_path: Path) -> None:
    parts = {
        "easy": MixedPart(weight=3, environment=ArithmeticSettings(levels=(1,), num_train=32, num_test=8)),
        "tool": MixedPart(weight=1, environment=CalculatorSettings(problems=FEW)),
    }
    rollout = {"problems_per_step": 4, "refill_rounds": 0, "max_tokens": 48}
    mixed = build_environment(MixedSettings(parts=parts))
    assert train(mixed, rollout=rollout, trainer={"steps": 2, "evaluate_problems": 8}) == 0
    for row in rows_of(tmp_path / "run"):
        assert (row["environment/easy/share"], row["environment/tool/share"]) == (0.75, 0.25)
        assert row["environment/tool/calls"] > 0
        assert "environment/easy/calls" not in row
        both = 0.75 * row["environment/easy/reward"] + 0.25 * row["environment/tool/reward"]
        assert row["reward/mean"] == pytest.approx(both)


def test_a_curriculum_is_saved_with_the_run(train: Train, tmp_path: Path) -> None:
    rollout = {"curriculum": {"by": "problem", "low": 0.3, "high": 0.7}, "problems_per_step": 6, "refill_below": 1}
    for steps in (3, 5):
        train(trainer={"steps": steps}, rollout=rollout, checkpoint={"resume": "auto"})
    train(folder="whole", trainer={"steps": 5}, rollout=rollout)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "whole", name)
    assert sum(row["problems/skipped"] for row in rows_of(tmp_path / "run")[3:]) > 0
    state = CheckpointManager(tmp_path / "run", CheckpointSettings()).load("auto")
    assert state is not None
    assert state.counters["curriculum"]["by"] == "problem"
    assert len(state.counters["curriculum"]["rates"]) > 10
