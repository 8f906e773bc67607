"""What a run goes on from, what it refuses, and what it says when its keys have changed."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.errors import CheckpointError
from parallm.types import Problem, Split

Train = Callable[..., int]
AUTO = {"resume": "auto", "every": 1}


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def newest_state(folder: Path) -> TrainingState:
    state = CheckpointManager(folder, CheckpointSettings()).load("auto")
    assert state is not None
    return state


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"prompt": f"{number} + 1?", "completion": f"#### {number + 1}"} for number in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "data.jsonl")


def problems_of(parity: Any, count: int) -> Any:
    """An environment with the first `count` problems."""

    class Few(parity):
        def problems(self, split: Split) -> Sequence[Problem]:
            found: Sequence[Problem] = super().problems(split)[:count]
            return found

    return Few()


def test_a_run_does_not_go_on_from_one_of_another_kind(train: Train, data: str, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, learner={"preset": "sft", "data": data})
    checkpoint = str(tmp_path / "run" / "step_000001")
    with pytest.raises(
        CheckpointError, match=r"step_000001 is of a run with learner=sft, and this one is with rollout"
    ):
        train(folder="next", trainer={"steps": 2}, checkpoint={"resume": checkpoint})


def test_what_is_no_checkpoint_is_refused_before_the_model_is_looked_for(train: Train, tmp_path: Path) -> None:
    for resume in ("yes", str(tmp_path)):
        with pytest.raises(CheckpointError, match=f"checkpoint.resume={resume} is no checkpoint"):
            train(checkpoint={"resume": resume}, model={"path": "nobody/nothing"})


def test_auto_goes_on_with_the_same_run_only(train: Train, parity: Any, tmp_path: Path) -> None:
    train(parity(), trainer={"steps": 1}, keys={"name": "arithmetic", "num_train": 32})
    with pytest.raises(CheckpointError) as refused:
        train(
            problems_of(parity, 8),
            seed=1,
            trainer={"steps": 2},
            learner={"preset": "gspo"},
            checkpoint=AUTO,
            keys={"name": "arithmetic", "num_train": 8},
        )
    keys = [line.partition(":")[0] for line in str(refused.value).splitlines()]
    assert keys == ["seed=1", "learner.preset=gspo", "environment.num_train=8"]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]


def test_demonstrations_that_have_moved_are_the_same_ones(train: Train, data: str, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, learner={"preset": "sft", "data": data})
    moved, shorter = tmp_path / "moved.jsonl", tmp_path / "shorter.jsonl"
    moved.write_text(Path(data).read_text())
    shorter.write_text("".join(Path(data).read_text().splitlines(keepends=True)[:5]))
    assert train(trainer={"steps": 2}, learner={"preset": "sft", "data": str(moved)}, checkpoint=AUTO) == 0
    with pytest.raises(
        CheckpointError, match=r"learner\.data=.*shorter\.jsonl: .* a run with learner\.data=.*moved\.js"
    ):
        train(trainer={"steps": 3}, learner={"preset": "sft", "data": str(shorter)}, checkpoint=AUTO)


def test_pairs_that_have_moved_are_the_same_ones(train: Train, tmp_path: Path) -> None:
    here, moved = tmp_path / "here.jsonl", tmp_path / "moved.jsonl"
    rows = [{"prompt": f"{number} + 1?", "chosen": "yes", "rejected": "no"} for number in range(12)]
    here.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved.write_text(here.read_text())
    for steps, data in enumerate((here, moved), start=1):
        learner = {"trains": "reward_model", "data": str(data)}
        assert train(trainer={"steps": steps}, learner=learner, checkpoint=AUTO) == 0


def test_what_a_researcher_changes_is_taken_and_said(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(trainer={"steps": 1})
    train(
        trainer={"steps": 2, "evaluate_every": 7},
        learner={"learning_rate": 0.25, "kl_coefficient": 0.1},
        rollout={"temperature": 0.9},
        checkpoint=AUTO,
        metrics={"display": "lines"},
    )
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("other values than in the run")]
    assert said.partition(": ")[2].split(", ") == [
        "learner.kl_coefficient=0.1 (was null)",
        "learner.learning_rate=0.25 (was 0.001)",
        "rollout.temperature=0.9 (was 1.5)",
        "trainer.evaluate_every=7 (was 0)",
    ]
    assert rows_of(tmp_path / "run")[1]["update/learning_rate"] == 0.25


def test_a_run_that_goes_on_unchanged_says_nothing_of_it(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (1, 2):
        train(trainer={"steps": steps}, checkpoint=AUTO, metrics={"display": "lines"})
    lines = capsys.readouterr().out
    assert "resumed after step 1, version 1" in lines
    assert "other values" not in lines


def test_a_named_checkpoint_may_be_branched_from_with_another_seed_and_other_problems(
    train: Train, parity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = {"evaluate_problems": 2, "evaluate_every": 1}
    train(parity(), trainer={"steps": 2} | evaluated)
    checkpoint = tmp_path / "run" / "step_000002"
    caplog.set_level(logging.WARNING)
    train(
        problems_of(parity, 3),
        "branch",
        seed=1,
        trainer={"steps": 3} | evaluated,
        checkpoint={"resume": str(checkpoint)},
        keys={"name": "arithmetic", "num_train": 3},
        metrics={"display": "lines"},
    )
    assert "seed=1 (was 0)" in capsys.readouterr().out
    assert "the problems or their order are not those of step 2: they begin anew" in caplog.messages
    assert "rewards of other problems are not compared: what is best begins anew" in caplog.messages
    before, after = newest_state(tmp_path / "run"), newest_state(tmp_path / "branch")
    assert (after.step, after.version) == (3, 3)
    assert after.counters["cursor"] <= 4  # one step's
    assert before.counters["cursor"] + 2 > after.counters["cursor"]
    assert after.counters["best"] == after.score


def test_problems_that_changed_without_a_key_begin_anew_and_the_run_goes_on(
    train: Train, parity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(parity(), trainer={"steps": 1})
    train(problems_of(parity, 9), trainer={"steps": 2}, checkpoint=AUTO)
    assert "the problems or their order are not those of step 1: they begin anew" in caplog.messages
    state = newest_state(tmp_path / "run")
    assert (state.step, state.counters["guard"]["divergence"]["num_rewards"]) == (2, 2)


def test_a_run_from_an_adapter_goes_on_with_the_same_command_and_with_no_other_adapter(
    train: Train, tmp_path: Path
) -> None:
    train(folder="other", trainer={"steps": 1})
    model = {"adapter": str(tmp_path / "other" / "adapter")}
    for steps in (1, 2):
        train(model=model, trainer={"steps": steps}, checkpoint=AUTO)
    assert newest_state(tmp_path / "run").version == 3
    checkpoint = str(tmp_path / "other" / "step_000001")
    with pytest.raises(CheckpointError, match=r"step_000001 began from a new one; leave model\.adapter out to go on"):
        train(folder="next", model=model, trainer={"steps": 2}, checkpoint={"resume": checkpoint})
    # one that does not say what it began from
    state = replace(newest_state(tmp_path / "other"), facts=None)
    checkpoint = str(CheckpointManager(tmp_path / "old", CheckpointSettings()).save(state))
    later = {"adapter": str(tmp_path / "run" / "adapter")}
    with pytest.raises(CheckpointError, match=r"model\.adapter is version 3 of policy, and the checkpoint version 1: "):
        train(folder="next", model=later, trainer={"steps": 2}, checkpoint={"resume": checkpoint})
    assert train(folder="next", trainer={"steps": 2}, checkpoint={"resume": checkpoint}) == 0


def test_options_of_an_environment_are_not_written_into_checkpoints(train: Train, tmp_path: Path) -> None:
    options = {"url": "http://user:secret@host", "n": 1}
    train(trainer={"steps": 1}, keys={"name": "custom", "target": "own:Own", "options": options})
    text = (tmp_path / "run" / "step_000001" / "state.json").read_text()
    assert '"environment.options.url"' in text
    assert "secret" not in text
