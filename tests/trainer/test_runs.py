"""What a run leaves behind when all goes well, and when it does not."""

import errno
import itertools
import json
import logging
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from parallm.checkpoint.format import write_checkpoint
from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.errors import AdapterError, CheckpointError, ConfigError, EnvironmentFailed, ProblemError, TrainingStopped
from parallm.metrics.step import StepMetrics
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.logprobs import Softmax
from parallm.reports import Evaluation
from parallm.rollout.evaluation import Evaluator
from parallm.trainer.guard import Verdict
from parallm.trainer.recovery import Recovery

Train = Callable[..., int]


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows without what the clock says."""
    file = folder / name
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if "second" not in key and key != "time"} for row in rows]


def saved_steps(folder: Path) -> list[int]:
    return [
        int(path.name.removeprefix("step_")) for path in CheckpointManager(folder, CheckpointSettings()).checkpoints()
    ]


def newest_state(folder: Path) -> TrainingState:
    state = CheckpointManager(folder, CheckpointSettings()).load("auto")
    assert state is not None
    return state


def test_a_run_leaves_its_numbers_samples_curves_checkpoints_and_adapters(train: Train, tmp_path: Path) -> None:
    assert train(metrics={"curves": True}, trainer={"steps": 3, "evaluate_problems": 4}) == 0
    folder = tmp_path / "run"
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
    assert {row["step"] for row in rows_of(folder, "samples.jsonl")} == {1, 2, 3}
    assert [row["step"] for row in rows_of(folder, "evaluations.jsonl")] == [0, 3]
    assert json.loads((folder / "summary.json").read_text())["figures"]["run.steps"] == 3
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert saved_steps(folder) == [1, 2, 3]
    trained = newest_state(folder).adapter
    assert {read_adapter(folder / name).digest for name in ("adapter", "adapter_peft")} == {trained.digest}
    assert (trained.version, trained.parent, trained.step) == (3, 2, 3)


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 16},
        {"rank": 2},
        {"rank": 3, "dora": True},
        {"rank": 8, "rslora": True, "ranks": {"q_proj": 1, "up_proj": 24}, "layers": 1},
    ],
    ids=str,
)
def test_every_step_is_exactly_on_policy(lora: dict[str, object], train: Train, tmp_path: Path) -> None:
    if not load_blas(DeviceSettings()).strict:
        pytest.skip("only MKL in strict mode promises equal bits")
    train(trainer={"steps": 3}, model={"lora": lora}, learner={"learning_rate": 0.003})
    for row in rows_of(tmp_path / "run"):
        assert row["parity/tokens"] > 0
        assert (row["parity/bit_equal_fraction"], row["parity/max_abs"]) == (1.0, 0.0)
        assert (row["update/clip_fraction"], row["update/kl_to_behaviour"]) == (0.0, 0.0)


def test_samples_say_which_version_made_them(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 3})
    versions = {(row["step"], row["version"]) for row in rows_of(tmp_path / "run", "samples.jsonl")}
    assert versions == {(1, 0), (2, 1), (3, 2)}


def test_the_same_seed_makes_the_same_run_and_another_seed_another(train: Train, tmp_path: Path) -> None:
    for folder in ("run", "again"):
        train(folder=folder, trainer={"steps": 2})
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "again", name)
    train(folder="other", trainer={"steps": 2}, seed=1)
    assert rows_of(tmp_path / "run") != rows_of(tmp_path / "other")


def test_without_a_learning_rate_nothing_changes_and_nothing_is_published(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"trainer": {"steps": 3, "evaluate_problems": 4}, "learner": {"learning_rate": 0.0}}
    train(**settings, metrics={"display": "lines"})
    folder = tmp_path / "run"
    before, after = rows_of(folder, "evaluations.jsonl")
    assert before["heldout_part/even"] == after["heldout_part/even"]
    for row in rows_of(folder):
        assert (row["update/skipped"], row["update/version"], row["update/adapter_delta_norm"]) == (None, 0, 0.0)
        assert (row["parity/tokens"] > 0, row["offpolicy/lag_max"], row["guard/idle"]) == (True, 0, 0)
    assert {row["version"] for row in rows_of(folder, "samples.jsonl")} == {0}
    state = newest_state(folder)
    assert (state.step, state.version, state.optimizer["b.step"].item()) == (3, 0, 3)
    assert all(float(abs(array).max()) == 0 for name, array in state.adapter.arrays.items() if name.endswith("lora_b"))
    assert [text for text in caplog.messages if "moved no weight" in text] == [
        "step 1: the update has moved no weight at learner.learning_rate=0: no new version"
    ]
    assert "no update has moved the adapter, so the run leaves none" in capsys.readouterr().out
    assert not (folder / "adapter").exists()


def test_a_run_that_has_learned_nothing_says_so(
    train: Train, calling: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = itertools.cycle([0.0, 1.0])
    train(calling(lambda: next(halves), *range(1, 999)), trainer={"steps": 6}, metrics={"display": "lines"})
    assert "the reward has not risen beyond its noise in 6 steps (0.500 in the first third" in capsys.readouterr().out


def test_a_run_in_which_nothing_moves_goes_on_as_if_nothing_had_been(train: Train, tmp_path: Path) -> None:
    off = {"learner": {"learning_rate": 0.0}, "checkpoint": {"resume": "auto", "every": 1}}
    ahead = {"max_off_policy_steps": 2}
    train(trainer={"steps": 1} | ahead, **off)
    train(trainer={"steps": 4} | ahead, **off)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {(row["offpolicy/lag_max"], row["offpolicy/dropped"], row["update/version"]) for row in rows} == {(0, 0, 0)}
    # and learns from where it stands
    train(trainer={"steps": 5}, checkpoint=off["checkpoint"])
    assert rows_of(tmp_path / "run")[4]["update/version"] == 1
    assert newest_state(tmp_path / "run").version == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_costs_one_completion(
    train: Train, calling: Any, tmp_path: Path, reward: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(calling(lambda: reward, 10), rollout={"refill_rounds": 0}, trainer={"steps": 3}) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["faults/total"] for row in rows] == [0, 1, 0]
    assert rows[1]["faults/score_not_finite"] == 1
    assert all(math.isfinite(row["reward/mean"]) for row in rows)
    assert [row["update/skipped"] for row in rows] == [None, None, None]
    assert f"step 2, score_not_finite: the part 'even' is {reward}; problem arithmetic-train-" in caplog.text


def test_a_statistic_that_is_not_finite_costs_no_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Softmax, "entropies", lambda softmax: mx.full(softmax.sums_N.shape, math.nan))
    assert train(trainer={"steps": 1}) == 0
    assert train(trainer={"steps": 3}, checkpoint={"resume": "auto"}) == 0
    assert saved_steps(tmp_path / "run") == [1, 2, 3]
    assert [row["update/entropy"] for row in rows_of(tmp_path / "run")] == [None] * 3


def raising(error: BaseException) -> Callable[[], float]:
    def fail() -> float:
        raise error

    return fail


@pytest.mark.parametrize("error", [ValueError("no number"), ProblemError("no answer"), SystemExit(3)])
def test_a_score_that_raises_costs_one_completion(
    train: Train, calling: Any, tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(calling(raising(error), 2), rollout={"refill_rounds": 0}, trainer={"steps": 1}) == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["faults/score_raised"], row["update/skipped"]) == (1, None)
    assert f"step 1, score_raised: {error!r}; problem" in caplog.text
    assert len(rows_of(tmp_path / "run", "samples.jsonl")) == 7


def test_an_environment_that_can_score_nothing_ends_the_run_after_one_step(
    train: Train, calling: Any, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        train(
            calling(raising(ValueError("no number")), *range(1, 99)), rollout={"refill_rounds": 3}, trainer={"steps": 9}
        )
    first, *_, last = str(failed.value).splitlines()
    assert first.startswith(
        "step 1: not one of 8 completions could be scored ({'score_raised': 8}); correct the environ"
    )
    assert f'File "{__file__}"' in str(failed.value)
    assert last == "ValueError: no number"
    assert [row["faults/total"] for row in rows_of(tmp_path / "run")] == [8]


def test_an_environment_that_can_score_nothing_is_known_before_the_first_step(
    train: Train, calling: Any, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed, match="evaluation: not one of 4 completions could be scored"):
        train(calling(raising(ValueError("no number")), *range(1, 99)), trainer={"evaluate_problems": 4})
    assert rows_of(tmp_path / "run") == []


def test_an_environment_that_fails_for_a_while_costs_steps_and_not_the_run(
    train: Train, calling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its judge is out of reach for step 2 and the evaluations before and after it: completions 13 to 28."""
    environment = calling(raising(OSError("no judge")), *range(13, 29))
    trainer = {"steps": 4, "evaluate_problems": 4, "evaluate_every": 1}
    assert train(environment, rollout={"refill_rounds": 0}, trainer=trainer) == 0
    assert [row["faults/total"] for row in rows_of(tmp_path / "run")] == [0, 8, 0, 0]
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0, 3, 4]
    assert (
        "after step 1 there is no evaluation, and training goes on: evaluation: not one of 4 completions" in caplog.text
    )


def test_a_run_that_can_score_nothing_any_more_says_so(train: Train, calling: Any) -> None:
    idle = {"max_idle_steps": 2, "refill_rounds": 0}
    with pytest.raises(TrainingStopped) as stopped:
        train(calling(raising(ValueError("no number")), *range(9, 99)), rollout=idle, trainer={"steps": 9})
    assert str(stopped.value) == (
        "in 2 steps there was nothing to learn from (rollout.max_idle_steps). In the last one 8 completions could not "
        "be scored ({'score_raised': 8}), and there were no others; correct the environment: its tracebacks are in the "
        "log"
    )


def test_a_score_that_hangs_costs_one_completion(train: Train, calling: Any, tmp_path: Path) -> None:
    def hang() -> float:
        while True:
            pass

    rollout = {"refill_rounds": 0, "score_seconds": 0.3}
    assert train(calling(hang, 2, 3), rollout=rollout, trainer={"steps": 2}) == 0
    first, second = rows_of(tmp_path / "run")
    assert (first["faults/score_timed_out"], first["update/skipped"]) == (2, None)
    assert second["faults/total"] == 0


def test_when_nothing_teaches_anything_training_stops_and_says_so(train: Train, constant: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match=r"in 2 steps there was .* the same reward \(\[0\.5\]\).*group_size"):
        train(constant(), rollout={"max_idle_steps": 2}, trainer={"steps": 9})
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert {row["update/skipped"] for row in rows} == {"no group had a signal"}


def test_a_whitened_step_of_equal_rewards_changes_nothing_and_training_stops(
    train: Train, constant: Any, tmp_path: Path
) -> None:
    learner, rollout = {"advantage": "reinforce_pp"}, {"max_idle_steps": 2, "refill_rounds": 0}
    with pytest.raises(TrainingStopped, match=r"in 2 steps there was .* the same reward \(\[0\.5\]\).*group_size"):
        train(constant(), learner=learner, rollout=rollout, trainer={"steps": 9})
    assert {row["update/skipped"] for row in rows_of(tmp_path / "run")} == {"the gradient is zero"}


def test_what_was_learned_before_nothing_teaches_any_more_is_saved(train: Train, constant: Any, tmp_path: Path) -> None:
    idle = {"max_idle_steps": 2, "refill_rounds": 0}
    with pytest.raises(TrainingStopped):
        train(constant(24), rollout=idle, trainer={"steps": 9}, checkpoint={"every": 100})
    state = newest_state(tmp_path / "run")
    assert (state.step, state.counters["idle_steps"]) == (5, 2)
    assert 1 <= state.version <= 3


def test_a_step_with_signal_starts_the_count_of_idle_steps_anew(train: Train, calling: Any, tmp_path: Path) -> None:
    steps = {"steps": 4}
    constant_but_once = calling(lambda: 0.5, *range(1, 9), *range(17, 33))  # steps 1, 3 and 4
    assert train(constant_but_once, rollout={"max_idle_steps": 3, "refill_rounds": 0}, trainer=steps) == 0
    assert newest_state(tmp_path / "run").counters["idle_steps"] == 2


def test_steps_before_an_error_are_saved_and_the_run_goes_on_from_there(
    train: Train, fail_in_round: Callable[[int], None], tmp_path: Path
) -> None:
    fail_in_round(4)
    rare = {"every": 100, "resume": "auto"}
    with pytest.raises(ProblemError, match="cannot be played"):
        train(checkpoint=rare, trainer={"steps": 4})
    assert saved_steps(tmp_path / "run") == [len(rows_of(tmp_path / "run"))]
    assert train(checkpoint=rare, trainer={"steps": 4}) == 0
    assert train(folder="whole", trainer={"steps": 4}) == 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "whole", name)


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_a_step_that_is_half_done_is_not_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """Its moments are those of the next step already, also where no weight has moved."""
    judge = Recovery.handle

    async def fail_at_two(recovery: Recovery, metrics: StepMetrics, **groups: Any) -> Verdict:
        if metrics.step == 2:
            raise ProblemError("cannot be judged")
        return await judge(recovery, metrics, **groups)

    monkeypatch.setattr(Recovery, "handle", fail_at_two)
    with pytest.raises(ProblemError):
        train(learner={"learning_rate": rate}, checkpoint={"every": 100})
    assert saved_steps(tmp_path / "run") == []


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(state: TrainingState, folder: Path) -> None:
        if state.step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_checkpoint(state, folder)

    monkeypatch.setattr("parallm.checkpoint.manager.write_checkpoint", write)
    assert train(trainer={"steps": 3}) == 0
    assert saved_steps(tmp_path / "run") == [1, 3]
    assert "the disk is full" in caplog.text
    assert "training goes on, the next try is in 1 steps" in caplog.text


def test_a_full_disk_at_the_end_is_an_error_and_leaves_older_checkpoints_and_the_last_adapter(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(state: TrainingState, folder: Path) -> None:
        if state.step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_checkpoint(state, folder)

    monkeypatch.setattr("parallm.checkpoint.manager.write_checkpoint", write)
    with pytest.raises(CheckpointError, match="step_000003 could not be saved, the disk is full"):
        train(trainer={"steps": 3})
    assert saved_steps(tmp_path / "run") == [1, 2]
    assert len(rows_of(tmp_path / "run")) == 3
    assert read_adapter(tmp_path / "run" / "adapter").version == 3
    assert f"version 3 is in {tmp_path / 'run' / 'adapter'}; the state of its training is lost" in caplog.text


def test_an_adapter_that_does_not_fit_leaves_the_one_before_as_it_was(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_half(adapter: Adapter, folder: Path, **_: object) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    auto = {"resume": "auto", "every": 1}
    train(trainer={"steps": 1}, checkpoint=auto)
    monkeypatch.setattr("parallm.trainer.saving.write_mlx", write_half)
    monkeypatch.setattr("parallm.checkpoint.manager.needed_bytes", lambda _: 2**62)
    with pytest.raises(CheckpointError, match="step_000002 could not be saved, the disk is full"):
        train(trainer={"steps": 2}, checkpoint=auto)
    assert f"{tmp_path / 'run' / 'adapter'} could not be written: [Errno 28] No space left on device" in caplog.text
    assert read_adapter(tmp_path / "run" / "adapter").version == 1
    assert not list((tmp_path / "run").glob(".*"))


def test_an_adapter_that_the_disk_does_not_take_is_an_error_in_one_line(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("parallm.trainer.saving.write_peft", write)
    said = (
        r"adapter_peft could not be written: .*No space left on device; version 1 is in \S+/adapter; the same adapter"
    )
    with pytest.raises(CheckpointError, match=said):
        train(trainer={"steps": 1})
    assert saved_steps(tmp_path / "run") == [1]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_evaluation(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Evaluator.evaluate

    async def interrupted(self: Evaluator, now: int, *arguments: Any) -> Evaluation:
        if now == step:
            interrupt()
        return await evaluate(self, now, *arguments)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)


def test_an_interrupt_finishes_the_step_saves_and_leaves(train: Train, calling: Any, tmp_path: Path) -> None:
    settings = {"steps": 9, "evaluate_problems": 4}  # whose scorings are the first four
    assert train(calling(interrupt, 7), trainer=settings, checkpoint={"every": 100}) == 0
    assert saved_steps(tmp_path / "run") == [1]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0]
    assert (tmp_path / "run" / "adapter").is_dir()


def test_an_interrupt_before_the_first_step_trains_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_evaluation(0, monkeypatch)
    assert train(trainer={"evaluate_problems": 4}) == 0
    assert rows_of(tmp_path / "run") == []
    assert saved_steps(tmp_path / "run") == []


def test_an_interrupt_drops_the_evaluation_and_saves_the_steps_before(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_evaluation(1, monkeypatch)
    settings = {"steps": 9, "evaluate_problems": 4, "evaluate_every": 1}
    assert train(trainer=settings, checkpoint={"every": 100}) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0]
    assert "the evaluation after step 1 was dropped" in caplog.text
    assert saved_steps(tmp_path / "run") == [1]


@pytest.mark.parametrize("step", [1, 2])  # between two steps, and at the end
def test_a_resumed_run_makes_up_the_evaluation_that_was_dropped(
    step: int, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 2, "evaluate_problems": 4, "evaluate_every": 1, "keep_best": True}
    auto = {"resume": "auto", "every": 100}
    with monkeypatch.context() as patch:
        interrupt_evaluation(step, patch)
        train(trainer=settings, checkpoint=auto)
    train(trainer=settings, checkpoint=auto)
    train(folder="whole", trainer=settings, checkpoint=auto)
    resumed, whole = newest_state(tmp_path / "run"), newest_state(tmp_path / "whole")
    assert (resumed.score, resumed.counters) == (whole.score, whole.counters)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "whole", name)


def test_a_step_of_an_older_checkpoint_counts_as_evaluated(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 1, "evaluate_problems": 4}
    with monkeypatch.context() as patch:
        interrupt_evaluation(1, patch)
        train(trainer=settings)
    state = newest_state(tmp_path / "run")
    older = {name: value for name, value in state.counters.items() if name != "evaluated_step"}
    CheckpointManager(tmp_path / "run", CheckpointSettings()).save(replace(state, counters=older))
    assert train(trainer=settings, checkpoint={"resume": "auto"}) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0]


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(train: Train, calling: Any, tmp_path: Path) -> None:
    auto = {"resume": "auto", "every": 100}
    train(calling(interrupt, 3), trainer={"steps": 3}, checkpoint=auto)
    assert len(rows_of(tmp_path / "run")) == 1
    train(trainer={"steps": 3}, checkpoint=auto)
    train(folder="whole", trainer={"steps": 3})
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(tmp_path / "run", name) == rows_of(tmp_path / "whole", name)


def test_a_finished_run_has_nothing_left_to_do(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    before = rows_of(tmp_path / "run")
    assert train(trainer={"steps": 2}, checkpoint={"resume": "auto"}) == 0
    assert rows_of(tmp_path / "run") == before
    assert train(trainer={"steps": 3}, checkpoint={"resume": "auto"}) == 0
    assert rows_of(tmp_path / "run")[:2] == before


def test_a_run_asks_for_more_at_a_moment_than_may_wait(train: Train, tmp_path: Path) -> None:
    trainer = {"steps": 1, "evaluate_problems": 4, "evaluate_samples": 2}
    rollout = {"problems_per_step": 6, "group_size": 2, "max_tokens": 8}
    assert train(trainer=trainer, rollout=rollout, engine={"max_waiting": 2}) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0, 1]


def test_completions_that_leave_no_room_for_a_prompt_are_refused_before_the_first(train: Train, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.max_tokens=64: prompt and completion together have 64 tokens \(engi"
    ):
        train(rollout={"max_tokens": 64}, engine={"max_context": 64})
    with pytest.raises(ConfigError, match=r"engine\.max_context=1025: the model knows 1024 positions"):
        train(engine={"max_context": 1025})


def test_problems_are_read_before_the_model_is_loaded(train: Train, parity: Any) -> None:
    environment = parity()
    environment.problems = lambda _: []
    with pytest.raises(ProblemError, match="train split has no problems"):
        train(environment, model={"path": "nobody/nothing"})


def test_a_run_starts_from_a_given_adapter(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    given = str(tmp_path / "run" / "adapter")
    model = {"adapter": given, "lora": {"rank": 4}}
    assert train(folder="next", trainer={"steps": 1}, model=model) == 0
    assert rows_of(tmp_path / "next", "samples.jsonl")[0]["version"] == 2
    assert newest_state(tmp_path / "next").version == 3


def test_a_form_that_is_asked_for_and_is_not_the_adapters_is_refused(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1})
    model = {"adapter": str(tmp_path / "run" / "adapter"), "lora": {"rank": 8}}
    with pytest.raises(AdapterError, match=r"has rank 4, the run 8; set model\.lora\.rank=4, or leave"):
        train(folder="next", model=model)


def test_a_given_adapter_is_trained_on_with_the_dropout_of_the_run(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, model={"lora": {"rank": 4}})
    given = str(tmp_path / "run" / "adapter")
    for folder, lora in (("none", {}), ("some", {"dropout": 0.5})):
        train(folder=folder, trainer={"steps": 1}, model={"adapter": given, "lora": lora})
    none, some = (newest_state(tmp_path / folder).adapter for folder in ("none", "some"))
    assert (none.dropout, some.dropout) == (0.0, 0.5)
    assert some.digest != none.digest


def test_a_resumed_run_has_the_dropout_that_it_asks_for(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, model={"lora": {"rank": 4, "dropout": 0.3}})
    train(trainer={"steps": 2}, checkpoint={"resume": "auto", "every": 1})
    assert newest_state(tmp_path / "run").adapter.dropout == 0.0
    assert rows_of(tmp_path / "run")[1]["parity/tokens"] > 0


FORMS: list[dict[str, object]] = [
    {"rank": 4, "dora": True, "layers": 1},
    {"rank": 4, "ranks": {"q_proj": 2, "down_proj": 12}, "rslora": True, "targets": ["q_proj", "down_proj"]},
    {"rank": 4, "ranks": {"q_proj": 2}, "dora": True, "rslora": True},
]


@pytest.mark.parametrize("lora", FORMS, ids=str)
def test_a_run_with_any_form_of_adapter_goes_on_as_if_nothing_had_been(
    lora: dict[str, object], train: Train, tmp_path: Path
) -> None:
    auto = {"resume": "auto", "every": 1}
    train(trainer={"steps": 1}, model={"lora": lora}, checkpoint=auto)
    train(trainer={"steps": 3}, model={"lora": lora}, checkpoint=auto)
    train(folder="whole", trainer={"steps": 3}, model={"lora": lora})
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert newest_state(tmp_path / "run").adapter.digest == newest_state(tmp_path / "whole").adapter.digest


@pytest.mark.parametrize("lora", FORMS, ids=str)
def test_a_run_starts_from_a_given_adapter_of_any_form(lora: dict[str, object], train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1}, model={"lora": lora})
    given = str(tmp_path / "run" / "adapter_peft")
    assert train(folder="next", trainer={"steps": 1}, model={"adapter": given, "lora": lora}) == 0
    assert newest_state(tmp_path / "next").adapter.version == 2


def test_a_checkpoint_of_another_rank_is_refused_and_nothing_is_lost(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 1})
    rows, steps = rows_of(tmp_path / "run"), saved_steps(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has LoRA rank 4, this run 8; set model\.lora\.rank=4"):
        train(model={"lora": {"rank": 8}}, checkpoint={"resume": "auto"})
    assert (rows_of(tmp_path / "run"), saved_steps(tmp_path / "run")) == (rows, steps)


def test_a_damaged_newest_checkpoint_costs_one_checkpoint(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(trainer={"steps": 3})
    whole = rows_of(tmp_path / "run")
    newest = tmp_path / "run" / "step_000003" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    caplog.set_level(logging.WARNING)
    train(trainer={"steps": 3}, checkpoint={"resume": "auto"})
    assert "was set aside" in caplog.text
    assert rows_of(tmp_path / "run") == whole


def test_dropout_trains_and_gives_the_same_run_twice(train: Train, tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4, "dropout": 0.3}}
    train(model=lora, trainer={"steps": 2})
    train(folder="again", model=lora, trainer={"steps": 2})
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "again")
    assert all(row["update/skipped"] is None for row in rows_of(tmp_path / "run"))


def accuracies(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Let the evaluations of a run find these accuracies, the first one before the first step."""
    found = iter(values)
    evaluate = Evaluator.evaluate

    async def evaluated(self: Evaluator, *arguments: Any) -> Evaluation:
        evaluation = await evaluate(self, *arguments)
        return replace(evaluation, report=replace(evaluation.report, accuracy=next(found)))

    monkeypatch.setattr(Evaluator, "evaluate", evaluated)


EVALUATED = {"steps": 9, "evaluate_problems": 4, "evaluate_every": 1}


def test_training_ends_when_patience_is_over(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies(monkeypatch, 0.9, 0.1, 0.3, 0.3, 0.2, 0.8)  # of the base, then of versions 1, 2, ...
    assert train(trainer=EVALUATED | {"patience": 2}) == 0
    state = newest_state(tmp_path / "run")
    assert (state.step, state.counters["best"], state.counters["since_best"]) == (4, 0.3, 2)
    assert read_adapter(tmp_path / "run" / "adapter").version == 4


def test_a_better_evaluation_brings_patience_back(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies(monkeypatch, 0.9, 0.3, 0.2, 0.4, 0.3, 0.2)
    assert train(trainer=EVALUATED | {"patience": 2}) == 0
    assert newest_state(tmp_path / "run").step == 5


def test_patience_goes_on_where_a_run_was_interrupted(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies(monkeypatch, 0.9, 0.3, 0.2, 0.1)
    settings = EVALUATED | {"patience": 2}
    train(trainer=settings | {"steps": 2})
    train(trainer=settings, checkpoint={"resume": "auto"})
    assert newest_state(tmp_path / "run").step == 3


def test_the_best_version_is_left_behind_if_asked_for(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies(monkeypatch, 0.9, 0.1, 0.3, 0.3, 0.2)
    assert train(trainer=EVALUATED | {"steps": 4, "keep_best": True}) == 0
    assert read_adapter(tmp_path / "run" / "adapter").version == 3  # the newest of equals
    assert newest_state(tmp_path / "run").version == 4


@pytest.mark.parametrize(("keeps", "left", "saved"), [(False, 3, [2, 4]), (True, 1, [1, 2, 4])])
def test_the_best_version_is_kept_over_a_resume_or_said_to_be_gone(
    keeps: bool,
    left: int,
    saved: list[int],
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    accuracies(monkeypatch, 0.9, 0.8, 0.3, 0.5, 0.4)
    never = {"every": 100, "keep": 9, "resume": "auto"}
    train(trainer=EVALUATED | {"steps": 2, "keep_best": keeps}, checkpoint=never)
    train(trainer=EVALUATED | {"steps": 4, "keep_best": True}, checkpoint=never)
    assert read_adapter(tmp_path / "run" / "adapter").version == left
    assert saved_steps(tmp_path / "run") == sorted({*saved, *([] if keeps else [3])})
    gone = "version 1, the best so far with 80.0%, was not saved; the best is version 2 now"
    assert (gone in caplog.messages) != keeps
    assert newest_state(tmp_path / "run").counters["best_version"] == left


def test_a_name_that_cannot_be_given_to_the_best_version_does_not_end_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AdapterError("'best' cannot be a name here")

    monkeypatch.setattr(AdapterTable, "set_alias", refuse)
    assert train(trainer=EVALUATED | {"steps": 1}) == 0
    assert "version 1 is the best so far and cannot be called so: 'best' cannot be a name here" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 2}, "this run has none; set trainer.evaluate_problems above 0"),
        ({"keep_best": True}, "this run has none; set trainer.evaluate_problems above 0"),
        ({"patience": 2, "evaluate_problems": 4}, "trainer.patience=2 counts evaluations between steps"),
    ],
)
def test_what_needs_evaluations_is_refused_without_them(train: Train, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(trainer=settings)
