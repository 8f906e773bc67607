"""Whole runs that sample in turns, and runs that sample ahead."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import ProblemError
from parallm.learner.learner import Learner
from parallm.rollout.problems import ProblemStream
from parallm.trainer.trainer import Trainer

Train = Callable[..., int]
AHEAD = {"steps": 6, "max_off_policy_steps": 1}


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def newest_state(folder: Path) -> TrainingState:
    state = CheckpointManager(folder, CheckpointSettings()).load("auto")
    assert state is not None
    return state


def test_in_turns_a_run_is_the_plain_loop_bit_for_bit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(trainer={"steps": 3})
    sampled: list[tuple[str, str, float]] = []

    async def plain_loop(self: Trainer) -> None:
        """Collect, train, publish: what a trainer without a pipeline does."""
        parts = self._context
        for step in range(3):
            collection = await parts.collector.collect(step, "policy")
            trajectories = [one for group in collection.sampled for one in group.trajectories]
            sampled.extend((one.problem_id, one.text, one.reward) for one in trajectories)
            units = parts.learner.update(collection.with_signal, step=step, max_tokens=16)
            await asyncio.wrap_future(parts.device.iterate(units))
            parts.adapters.publish(parts.learner.adapter)
            self._step += 1
        await asyncio.wrap_future(parts.device.call(partial(parts.checkpoints.save, self._state())))

    monkeypatch.setattr(Trainer, "run", plain_loop)
    train(folder="plain", trainer={"steps": 3})
    rows = rows_of(tmp_path / "run", "samples.jsonl")
    assert sorted(sampled) == sorted((row["problem_id"], row["completion"], row["reward"]) for row in rows)
    assert newest_state(tmp_path / "run").adapter.digest == newest_state(tmp_path / "plain").adapter.digest


@pytest.mark.parametrize("switches", [False, True])
def test_no_token_is_trained_on_beyond_the_limit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switches: bool
) -> None:
    lags: list[int] = []
    update = Learner.update

    def watched(self: Learner, groups: Any, **values: Any) -> Any:
        trajectories = [one for group in groups for one in group.trajectories]
        lags.extend(self.adapter.version - span.version for one in trajectories for span in one.weight_versions)
        return update(self, groups, **values)

    monkeypatch.setattr(Learner, "update", watched)
    train(trainer=AHEAD, rollout={"switch_in_flight": switches})
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["offpolicy/lag_max"] == 0
    assert set(lags) <= {0, 1}
    assert max(row["offpolicy/lag_max"] for row in rows) == max(lags) == 1
    assert {row["offpolicy/dropped"] for row in rows} == {0}
    trained = [row for row in rows if "update/tokens" in row]  # the others had no group with signal
    assert all(row["offpolicy/tokens"] + row["parity/tokens"] == row["update/tokens"] for row in trained)


def assert_every_problem_once(folder: Path, group_size: int = 4) -> None:
    """The run has sampled the first problems of the stream and no others, each as often as it came."""
    samples = Counter(row["problem_id"] for row in rows_of(folder, "samples.jsonl"))
    cursor = newest_state(folder).counters["cursor"]
    stream = ProblemStream(Arithmetic(ArithmeticSettings(num_train=32, num_test=4)).problems("train"), 0)
    expected = Counter(stream.at(index).problem_id for index in range(cursor))
    assert samples == {name: group_size * count for name, count in expected.items()}


def test_an_interrupted_run_ahead_loses_and_repeats_no_problem(train: Train, calling: Any, tmp_path: Path) -> None:
    auto = {"resume": "auto", "every": 100}
    train(calling(lambda: os.kill(os.getpid(), signal.SIGINT), 12), trainer=AHEAD, checkpoint=auto)
    state = newest_state(tmp_path / "run")
    assert 1 <= state.step < 6
    assert state.counters["again"] != []
    train(trainer=AHEAD, checkpoint=auto)
    assert newest_state(tmp_path / "run").counters["again"] == []
    assert_every_problem_once(tmp_path / "run")


def test_a_run_ahead_goes_on_after_an_error_without_losing_a_problem(
    train: Train, fail_in_round: Callable[[int], None], tmp_path: Path
) -> None:
    fail_in_round(4)
    rare = {"every": 100, "resume": "auto"}
    with pytest.raises(ProblemError):
        train(trainer=AHEAD, checkpoint=rare)
    assert newest_state(tmp_path / "run").step == len(rows_of(tmp_path / "run")) > 0
    train(trainer=AHEAD, checkpoint=rare)
    assert_every_problem_once(tmp_path / "run")


def test_a_resumed_run_may_sample_further_ahead_than_before(train: Train, tmp_path: Path) -> None:
    auto = {"resume": "auto"}
    train(trainer={"steps": 2}, checkpoint=auto)
    train(trainer={"steps": 4, "max_off_policy_steps": 2}, checkpoint=auto)
    assert_every_problem_once(tmp_path / "run")
