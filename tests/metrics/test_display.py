"""The displays write what people need and give everything back."""

import io
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from parallm.metrics.display import Display, RunHeader, step_line
from parallm.metrics.eta import Schedule
from parallm.metrics.formatting import duration
from parallm.metrics.live_display import LiveDisplay, fitting_columns, make_display, numbers_now, step_table
from parallm.metrics.log_capture import PROGRESS
from parallm.metrics.step import StepMetrics
from parallm.reports import Estimate, EvaluationReport, TrainingStatus

HEADER = RunHeader(
    name="quickstart",
    model="nano",
    device="CPU",
    blas="MKL, strict",
    url="http://127.0.0.1:8000",
    folder="runs/one",
    schedule=Schedule(total_steps=10),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    return Terminal()


def test_auto_is_live_on_a_terminal_and_lines_elsewhere(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_display("auto", terminal), LiveDisplay)
    assert not isinstance(make_display("auto", io.StringIO()), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert not isinstance(make_display("auto", terminal), LiveDisplay)


def test_lines_writes_one_line_per_step_and_evaluation(
    step: Callable[..., StepMetrics], evaluation: Callable[..., EvaluationReport]
) -> None:
    stream = io.StringIO()
    display = make_display("lines", stream)
    display.start(HEADER)
    header = len(stream.getvalue().splitlines())
    display.evaluation(evaluation(0))
    display.step(step(1))
    display.close()
    first, second = stream.getvalue().splitlines()[header:]
    assert first.startswith("evaluation at step 0: held-out accuracy 31.0% (27.0% to 35.0%), 512 problems, version 0")
    assert second.startswith("step 1/10  reward 0.250  signal 11/16  length 64  kl 4.00e-04  entropy 0.900")
    assert second.endswith("36 s left")


def test_a_step_without_an_update_says_why_on_its_line(step: Callable[..., StepMetrics]) -> None:
    stream = io.StringIO()
    make_display("lines", stream).step(step(1, update=None))
    assert "no update: no group had a signal" in stream.getvalue()


def test_lines_survive_a_stream_that_is_ascii_only() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    make_display("lines", stream).message("na\u00efve")
    stream.seek(0)
    assert stream.read() == "na\\xefve\n"


@pytest.mark.parametrize("choice", ["live", "lines"])
def test_warnings_go_through_the_display_while_it_runs(choice: str, terminal: Terminal) -> None:
    console = logging.StreamHandler()  # as logging.basicConfig makes it
    logging.getLogger("parallm.test").addHandler(console)
    try:
        display = LiveDisplay(terminal) if choice == "live" else Display(terminal)
        display.start(HEADER)
        assert logging.getLogger("parallm.test").handlers == []
        logging.getLogger("parallm.test").warning("checkpoint [bold]7[/bold] is broken")
        logging.getLogger("somebody.else").info("hidden")
        display.close()
        assert logging.getLogger("parallm.test").handlers == [console]
    finally:
        logging.getLogger("parallm.test").removeHandler(console)
    assert "checkpoint [bold]7[/bold] is broken" in terminal.getvalue()
    assert "hidden" not in terminal.getvalue()


@pytest.mark.parametrize("choice", ["live", "lines"])
def test_why_a_run_failed_is_left_to_the_command_to_say(choice: str, terminal: Terminal) -> None:
    display = LiveDisplay(terminal) if choice == "live" else Display(terminal)
    display.start(HEADER)
    display.phase(TrainingStatus(state="failed", message="nothing teaches anything"))
    display.close()
    assert "nothing teaches anything" not in terminal.getvalue()


@pytest.mark.parametrize("width", ["12", "30", "60", "200"])
def test_live_shows_a_run_at_any_width(
    width: str,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[..., StepMetrics],
    evaluation: Callable[..., EvaluationReport],
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    display = LiveDisplay(terminal)
    display.start(HEADER)
    display.phase(TrainingStatus(state="collecting", total_steps=10, metrics={"step/fraction": 0.5}))
    display.evaluation(evaluation(0))
    for number in range(1, 60):
        display.step(step(number))
    display.finish([("files", "runs/one")])
    assert "reward" in terminal.getvalue()
    assert "files" in terminal.getvalue()


def test_closing_live_gives_the_cursor_back_and_may_happen_twice(terminal: Terminal) -> None:
    display = LiveDisplay(terminal)
    display.close()
    display.start(HEADER)
    display.close()
    display.close()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_narrow_terminals_keep_the_most_wanted_columns() -> None:
    assert [column.title for column in fitting_columns(20)] == ["step", "reward"]
    assert [column.title for column in fitting_columns(1)] == ["step"]
    assert len(fitting_columns(200)) == 14


def test_an_evaluation_with_samples_says_pass_at_k(evaluation: Callable[..., EvaluationReport]) -> None:
    stream = io.StringIO()
    pass_at = {4: Estimate(0.8, 0.7, 0.9)}
    make_display("lines", stream).evaluation(evaluation(3, pass_at=pass_at, num_samples=4))
    assert "version 3, pass@4 80.0% (70.0% to 90.0%), reward 0.500, correct 31.0%" in stream.getvalue()


def test_an_evaluation_on_demonstrations_says_their_loss() -> None:
    stream = io.StringIO()
    report = EvaluationReport(step=3, version=3, loss=1.25, num_demonstrations=57)
    make_display("lines", stream).evaluation(report)
    expected = "evaluation at step 3: held-out loss 1.25 of 57 demonstrations, version 3\n"
    assert stream.getvalue() == expected


def test_lines_say_how_far_an_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.metrics.eta.SECONDS_BETWEEN", 0.0)
    stream = io.StringIO()
    display = make_display("lines", stream)
    for done in (1, 2, 3):
        display.progress(done, 3)
    assert stream.getvalue().splitlines() == ["evaluation: 1 of 3", "evaluation: 2 of 3"]


def test_live_shows_how_far_an_evaluation_is_until_the_next_phase(terminal: Terminal) -> None:
    display = LiveDisplay(terminal)
    console = Console(file=terminal, width=100, height=40)
    display.phase(TrainingStatus(state="evaluating", step=3, total_steps=10))
    display.progress(128, 512)
    console.print(display)
    assert "128 of 512" in terminal.getvalue()
    display.phase(TrainingStatus(state="updating", step=3, total_steps=10))
    terminal.truncate(0)
    console.print(display)
    assert "128 of 512" not in terminal.getvalue()


LONG = "checkpoints/arithmetic_grpo/sweep_2026-11-22_09-43-45-427093/12/with/more/of/it/than/a/line/takes"


def plain(shown: str) -> list[str]:
    """Lines without colours and movements of the cursor."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()]


def test_paths_stand_on_lines_of_their_own_that_nothing_breaks(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    display = LiveDisplay(terminal)
    display.start(replace(HEADER, folder=LONG))
    display.message(f"saved {LONG}")
    display.finish([("best version", "3"), ("files", LONG)])
    lines = plain(terminal.getvalue())
    assert {f"files    {LONG}", f"saved {LONG}", f"files  {LONG}"} <= set(lines)
    assert all(len(line) <= 80 for line in lines if LONG not in line)


def test_the_live_table_has_the_signal_and_what_a_curriculum_skips(step: Callable[..., StepMetrics]) -> None:
    def titles(*steps: StepMetrics) -> list[str]:
        return [column.title for column in fitting_columns(78, steps)]

    assert titles(step(1)) == ["step", "reward", "signal", "held out", "KL", "entropy", "length", "time"]
    assert "skipped" in titles(step(1), step(2, problems_skipped=3))
    table = step_table([step(1, problems_skipped=3)], [], 78)
    console = Console(file=io.StringIO(), width=78)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    title, _, row = console.file.getvalue().splitlines()
    assert title.split()[:4] == ["step", "reward", "signal", "skipped"]
    assert row.split()[:5] == ["1", "0.250", "11/16", "3", "-"]


@pytest.mark.parametrize("seconds", [61.0, 3599.0, 36000.0])
def test_the_live_table_shows_how_long_a_slow_step_took(step: Callable[..., StepMetrics], seconds: float) -> None:
    console = Console(file=io.StringIO(), width=78)
    console.print(step_table([step(1, total_seconds=seconds)], [], 78))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith(duration(seconds))


def test_the_live_table_of_a_supervised_run_has_its_loss_and_nothing_of_samples(
    step: Callable[..., StepMetrics],
) -> None:
    titles = [column.title for column in fitting_columns(200, [step(1, is_supervised=True)])]
    assert titles == ["step", "loss", "held out", "entropy", "gradient", "moved", "serving tok/s", "version", "time"]


def test_the_live_table_of_a_supervised_run_has_the_held_out_loss(step: Callable[..., StepMetrics]) -> None:
    report = EvaluationReport(step=1, version=1, loss=1.25, num_demonstrations=57)
    steps = [step(1, is_supervised=True), step(2, is_supervised=True)]
    console = Console(file=io.StringIO(), width=100)
    console.print(step_table(steps, [report], 100))
    console.print(numbers_now(steps, [report], TrainingStatus(state="updating"), 100))
    assert isinstance(console.file, io.StringIO)
    title, _, first, second, now = console.file.getvalue().splitlines()[:5]
    assert title.split()[:4] == ["step", "loss", "held", "out"]
    assert (first.split()[2], second.split()[2]) == ("1.25", "-")
    assert "held out loss 1.25" in now


def test_lines_say_what_a_curriculum_has_skipped_and_what_waits(step: Callable[..., StepMetrics]) -> None:
    stream = io.StringIO()
    display = make_display("lines", stream)
    display.step(step(1))
    display.step(step(2, problems_skipped=3, source={"live/waiting": 8.0, "live/rewarded": 2.0}))
    first, second = stream.getvalue().splitlines()
    assert "skipped" not in first
    assert "wait" not in first
    assert "signal 11/16  skipped 3  length 64" in second
    assert "8 wait for a reward, 2 have one" in second


def test_a_message_of_a_state_is_shown_once() -> None:
    stream = io.StringIO()
    display = make_display("lines", stream)
    for _ in range(3):
        display.phase(TrainingStatus(state="collecting", message="run-api does not answer"))
    display.phase(TrainingStatus(state="collecting"))
    display.phase(TrainingStatus(state="collecting", message="run-api does not answer"))
    assert stream.getvalue().splitlines() == ["run-api does not answer"] * 2


@pytest.mark.parametrize("choice", ["live", "lines", "off"])
def test_the_log_has_what_a_display_shows_and_a_display_no_line_of_it_twice(
    choice: Literal["live", "lines", "off"],
    terminal: Terminal,
    caplog: pytest.LogCaptureFixture,
    step: Callable[..., StepMetrics],
    evaluation: Callable[..., EvaluationReport],
) -> None:
    display = make_display(choice, terminal, is_logged=True)
    with caplog.at_level(logging.INFO, PROGRESS):
        display.start(HEADER)
        display.evaluation(evaluation(0))
        display.step(step(1))
        display.message("resumed")
        display.finish([("best version", "1"), ("files", "runs/one")])
    logged = [record.getMessage() for record in caplog.records if record.name == PROGRESS]
    assert logged[0] == "run     quickstart"
    assert [line.split()[:2] for line in logged[6:]] == [
        ["evaluation", "at"],
        ["step", "1/10"],
        ["resumed"],
        ["best", "version"],
        ["files", "runs/one"],
    ]
    shown = plain(terminal.getvalue())
    assert shown.count("resumed") == (choice != "off")
    assert sum(line.startswith("evaluation at step 0") for line in shown) == (choice != "off")


def test_a_step_says_how_far_the_adapter_moved(step: Callable[..., StepMetrics]) -> None:
    update = step(1).update
    assert update is not None
    moved = replace(update, adapter_norm=5.0, adapter_delta_norm=0.01)
    assert "  moved 0.0020  " in step_line(step(1, update=moved), None, "")
    still = replace(moved, adapter_delta_norm=0.0, has_moved=False)
    assert "  moved nothing  version 1  " in step_line(step(1, update=still), None, "")
    assert "moved" not in step_line(step(1, update=replace(update, skipped="the gradient is zero")), None, "")


def test_the_page_stands_below_the_server() -> None:
    rows = replace(HEADER, url="http://127.0.0.1:8000", page="http://127.0.0.1:8000/dashboard/").rows()
    assert [value for name, value in rows if name in ("server", "page")] == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/dashboard/",
    ]
    assert "page" not in dict(HEADER.rows())
