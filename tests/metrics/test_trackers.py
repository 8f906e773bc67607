"""Other programs that show a run get its rows, and none of them can end it."""

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parallm.metrics.record import RunRecorder
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics
from parallm.metrics.trackers import COMPLETION_COLUMNS, EVALUATED, Trackers
from parallm.reports import EvaluationReport

ROW = {"step": 7, "time": 1_700_000_000.5, "loss": 0.5, "bad": math.nan, "text": "a", "missing": None}
COMPLETION = {"step": 7, "problem_id": "p", "prompt": "2 + 3?", "completion": "5", "reward": 1.0}


class Calls(list[Any]):
    """A program that notes what it is asked for."""

    def __getattr__(self, name: str) -> Callable[..., "Calls"]:
        def note(*arguments: Any, **options: Any) -> "Calls":
            self.append((name, arguments, options))
            return self

        return note


def test_tensorboard_files_hold_the_numbers_at_their_times(tmp_path: Path) -> None:
    protobuf = pytest.importorskip("tensorboardX.proto.event_pb2")
    reader = pytest.importorskip("tensorboardX.record_writer")
    trackers = Trackers(tmp_path, MetricsSettings(tensorboard=True), {})
    trackers.log(ROW, [COMPLETION])
    trackers.finish({})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert reader is not None
    content, scalars, texts = file.read_bytes(), {}, []
    while content:
        length = int.from_bytes(content[:8], "little")
        event = protobuf.Event.FromString(content[12 : 12 + length])
        content = content[12 + length + 4 :]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars[value.tag] = (event.step, event.wall_time, value.simple_value)
            else:
                texts.append(value.tensor.string_val[0].decode())
    assert scalars == {"loss": (7, 1_700_000_000.5, 0.5)}
    assert len(texts) == 1
    assert "2 + 3?" in texts[0]


@pytest.mark.parametrize(("row", "purged"), [(ROW, 7), ({**ROW, EVALUATED: 7}, 8)])
def test_a_resumed_run_hides_what_its_tensorboard_files_hold_of_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], purged: int
) -> None:
    calls = Calls()
    monkeypatch.setattr("tensorboardX.SummaryWriter", calls.SummaryWriter)
    trackers = Trackers(tmp_path, MetricsSettings(tensorboard=True), {})
    trackers.log(row)
    assert calls[0][2]["purge_step"] == purged


def test_trackio_gets_numbers_at_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, module = Calls(), ModuleType("trackio")
    setattr(module, "init", calls.init)  # noqa: B010 - a module of this test
    monkeypatch.setitem(sys.modules, "trackio", module)
    trackers = Trackers(tmp_path / "sums" / "time", MetricsSettings(trackio=True, project="maths"), {"a": math.inf})
    trackers.log(ROW, [COMPLETION])
    trackers.finish({"steps": 7})
    assert calls[0][2] == {
        "project": "maths",
        "name": "sums/time",
        "resume": "allow",
        "config": {"a": None},
        "embed": False,
    }
    assert calls[1] == ("log", ({"time": 1_700_000_000.5, "loss": 0.5},), {"step": 7})
    assert calls[2][0] == "finish"


def test_completions_become_a_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr("wandb.init", calls.init)
    monkeypatch.setattr("wandb.Table", lambda columns, rows: (columns, rows))
    trackers = Trackers(tmp_path, MetricsSettings(wandb="offline"), {})
    trackers.log(ROW, [COMPLETION])
    (logged,) = (arguments[0] for name, arguments, _ in calls if name == "log")
    columns, rows = logged["completions"]
    assert columns == list(COMPLETION_COLUMNS)
    assert dict(zip(columns, rows[0], strict=True)) == COMPLETION | dict.fromkeys(
        ("answer", "version", "finish_reason")
    )
    assert (logged["step"], logged["loss"]) == (7, 0.5)
    assert "bad" not in logged


def test_a_program_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no service")

    calls = Calls()
    monkeypatch.setattr("wandb.init", refuse)
    monkeypatch.setattr("tensorboardX.SummaryWriter", calls.SummaryWriter)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with caplog.at_level(logging.WARNING):
        trackers = Trackers(tmp_path, MetricsSettings(wandb="offline", trackio=True, tensorboard=True), {})
        trackers.log(ROW)
        trackers.log(ROW)
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["wandb", "trackio"]
    assert [name for name, _, _ in calls].count("add_scalar") == 2


def test_a_recorder_hands_over_steps_and_evaluations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[..., StepMetrics],
    evaluation: Callable[..., EvaluationReport],
) -> None:
    calls = Calls()
    monkeypatch.setattr("tensorboardX.SummaryWriter", calls.SummaryWriter)
    recorder = RunRecorder(tmp_path, MetricsSettings(tensorboard=True), {})
    recorder.start()
    recorder.step(step(1))
    recorder.evaluation(evaluation(1))
    recorder.finish("run")
    names = {arguments[0] for name, arguments, _ in calls if name == "add_scalar"}
    assert {"reward/mean", "heldout/accuracy"} <= names
    assert calls[-1][0] == "close"
