"""Several policies on one base: each becomes what it would have become alone, and none sees another's versions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.errors import ConfigError, TrainingStopped
from parallm.model.adapters.files import read_adapter
from parallm.reports import Evaluation
from parallm.rollout.evaluation import Evaluator

Train = Callable[..., int]

POLICIES: Mapping[str, Any] = {
    "poet": {"learner": {"learning_rate": 0.003}},
    "coder": {"rollout": {"group_size": 6, "temperature": 1.2}, "trainer": {"steps": 2}},
}


def newest_state(folder: Path) -> TrainingState:
    state = CheckpointManager(folder, CheckpointSettings()).load("auto")
    assert state is not None
    return state


@pytest.mark.skipif(not load_blas(DeviceSettings()).strict, reason="only a strict BLAS computes a row alike in company")
def test_policies_trained_together_become_what_they_become_alone(train: Train, tmp_path: Path) -> None:
    settings = {"steps": 3, "evaluate_problems": 4, "evaluate_every": 1}
    assert train(trainer=settings, policies=POLICIES) == 0
    for name, own in POLICIES.items():
        parts = {part: keys for part, keys in own.items() if part != "trainer"}
        train(folder=f"only_{name}", **parts, trainer=settings | own.get("trainer", {}))
        together, alone = newest_state(tmp_path / "run" / name), newest_state(tmp_path / f"only_{name}")
        assert (together.adapter.name, together.version) == (name, alone.version)
        assert together.adapter.digest == alone.adapter.digest
        assert read_adapter(tmp_path / "run" / name / "adapter").digest == together.adapter.digest


def test_policies_that_were_interrupted_go_on(train: Train, tmp_path: Path) -> None:
    auto = {"resume": "auto", "every": 1}
    train(trainer={"steps": 1}, policies={"poet": {}, "coder": {}}, checkpoint=auto)
    train(trainer={"steps": 2}, policies={"poet": {}, "coder": {}}, checkpoint=auto)
    train(folder="whole", trainer={"steps": 2}, policies={"poet": {}, "coder": {}})
    for name in ("poet", "coder"):
        states = [newest_state(tmp_path / folder / name) for folder in ("run", "whole")]
        assert states[0].step == 2
        assert states[0].adapter.digest == states[1].adapter.digest


def test_each_policy_waits_for_its_own_evaluations_before_it_is_served(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"poet": [0.5, 0.6, 0.1], "singer": [0.5, 0.1, 0.1], "coder": [0.5, 0.6, 0.1]}  # base, version 1, version 2
    evaluate = Evaluator.evaluate

    async def evaluated(
        self: Evaluator, step: int, version: int, model: str, progress: Callable[[int, int], None]
    ) -> Evaluation:
        evaluation = await evaluate(self, step, version, model, progress)
        accuracy = found[model.removesuffix("@latest")][step]
        return replace(evaluation, report=replace(evaluation.report, accuracy=accuracy))

    monkeypatch.setattr(Evaluator, "evaluate", evaluated)
    waits = {"publish_if": "evaluation", "publish_margin": 0.0}
    policies = {"poet": {"trainer": waits}, "singer": {"trainer": waits}, "coder": {}}
    train(trainer={"steps": 2, "evaluate_every": 1, "evaluate_problems": 4}, policies=policies)
    states = {name: newest_state(tmp_path / "run" / name) for name in policies}
    served = {name: state.counters["publication"]["served"] for name, state in states.items()}
    assert served == {"poet": 1, "singer": 0, "coder": 2}
    assert {state.version for state in states.values()} == {2}
    left = {name: tmp_path / "run" / name / "adapter" for name in policies}
    assert {name: read_adapter(path).version for name, path in left.items() if path.exists()} == {"poet": 1, "coder": 2}


def test_a_policy_that_fails_does_not_stop_the_others(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policies = {"broken": {"rollout": {"max_tokens": 1000}}, "poet": {}}
    with pytest.raises(
        TrainingStopped, match=r"^broken: .* with rollout\.max_tokens=1000 it does not fit the context of"
    ):
        train(trainer={"steps": 2}, policies=policies)
    assert newest_state(tmp_path / "run" / "poet").step == 2
    assert read_adapter(tmp_path / "run" / "poet" / "adapter").version == 2
    assert any(text.startswith("broken: training has failed, the other policies go on") for text in caplog.messages)


def test_a_run_that_would_leave_checkpoints_of_another_policy_behind_is_refused(train: Train, tmp_path: Path) -> None:
    auto = {"resume": "auto", "every": 1}
    train(trainer={"steps": 1}, policies={"poet": {}}, checkpoint=auto)
    others: list[Mapping[str, Any]] = [{"coder": {}}, {}]
    for policies in others:
        with pytest.raises(ConfigError, match="holds checkpoints of poet, which this run does not train; name the"):
            train(trainer={"steps": 2}, policies=policies, checkpoint=auto)
    assert train(trainer={"steps": 2}, policies={"poet": {}, "coder": {}}, checkpoint=auto) == 0
    assert [newest_state(tmp_path / "run" / name).step for name in ("poet", "coder")] == [2, 2]


def test_one_policy_of_several_goes_on_alone(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, policies={"poet": {}, "coder": {}})
    train(folder="alone", trainer={"steps": 2}, checkpoint={"resume": str(tmp_path / "run" / "poet" / "step_000001")})
    state = newest_state(tmp_path / "alone")
    assert (state.step, state.version, state.adapter.name) == (2, 2, "policy")


def test_lines_on_the_screen_and_warnings_say_whose_they_are(
    train: Train, calling: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    environment = calling(lambda: float("nan"), 1)
    train(environment, trainer={"steps": 1}, policies={"poet": {}, "coder": {}}, metrics={"display": "lines"})
    lines = capsys.readouterr().out.splitlines()
    assert "policies  poet, coder" in lines
    assert {line[: line.index("step 1/1")] for line in lines if "step 1/1" in line} == {"poet: ", "coder: "}
    assert any(line.startswith(("warning: poet: ", "warning: coder: ")) for line in lines)
    assert "policies poet and coder differ in nothing, so both learn the same" in caplog.messages
