"""What becomes of a gang whose workers end: restarts, exit codes, and a line in the run folder. Without processes."""

import json
import os
import pty
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from parallm import interrupts as interrupts_module
from parallm.distributed import gang as gang_module
from parallm.distributed.gang import GANGS, Interrupts, run_gangs
from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import EXCHANGE_FAILED, RANKS, STATUS
from parallm.errors import ExchangeFailed

KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM
Play = Callable[..., int]


class Actor:
    """A worker that ends after some polls, or when it is signalled."""

    def __init__(self, pid: int, code: int | None, polls: int, answers: bool) -> None:
        self.pid = pid
        self.signals: list[int] = []
        self._code, self._polls, self._answers = code, polls, answers
        self._ended: int | None = None

    def poll(self) -> int | None:
        self._polls -= 1
        if self._ended is None and self._polls < 0:
            self._ended = self._code
        return self._ended

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        if self._answers:
            self._ended = 0

    def kill(self) -> None:
        self._ended = KILLED


class Stage:
    """Machines that start the gangs of a script: codes by rank; None: until it is asked to end."""

    def __init__(
        self,
        *gangs: Sequence[int | None],
        answers: bool = True,
        grows: bool = False,
        at_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._at_start = at_start
        self.overrides: list[tuple[str, ...]] = []
        self.workers: list[Actor] = []
        self._gangs, self._answers, self._grows = list(gangs), answers, grows

    def start(self, overrides: Sequence[str]) -> list[Actor]:
        self.overrides.append(tuple(overrides))
        if not self._gangs:
            raise ExchangeFailed("no place")
        self._at_start()
        codes = self._gangs.pop(0)
        first = len(self.workers) + 1
        # those who lose a peer end a little later
        workers = [
            Actor(first + rank, code, 8 if code == EXCHANGE_FAILED else 4, self._answers)
            for rank, code in enumerate(codes)
        ]
        self.workers += workers
        return workers

    def has_more(self) -> bool:
        return self._grows and len(self.overrides) == 1


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(gang_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(gang_module, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(gang_module, "SAVED_SECONDS", 0.1)

    def run(stage: Stage, *, restarts: int = 0, resume: str = "never", interrupts: Interrupts | None = None) -> int:
        settings = DistributedSettings(engine="mlx", workers=2, restarts=restarts)
        return run_gangs(stage, settings, tmp_path, resume=resume, interrupts=interrupts or Interrupts())

    return run


def gangs(folder: Path) -> list[list[dict[str, object]]]:
    return [json.loads(line)["workers"] for line in (folder / RANKS / GANGS).read_text().splitlines()]


def tell(folder: Path, rank: int, process: int, reason: str) -> None:
    (folder / RANKS / str(rank)).mkdir(parents=True)
    status = {"process": process, "host": "node", "reason": reason}
    (folder / RANKS / str(rank) / STATUS).write_text(json.dumps(status))


def test_a_gang_that_loses_a_worker_is_started_again(play: Play, tmp_path: Path) -> None:
    stage = Stage((KILLED, EXCHANGE_FAILED), (0, 0))
    assert play(stage, restarts=1) == 0
    assert stage.overrides == [(), ("checkpoint.resume=auto",)]
    assert [[worker["code"] for worker in one] for one in gangs(tmp_path)] == [[KILLED, EXCHANGE_FAILED], [0, 0]]
    assert gangs(tmp_path)[0][0]["was_lost"]


def test_no_gang_is_started_beyond_the_restarts(play: Play) -> None:
    stage = Stage(*[(KILLED, EXCHANGE_FAILED)] * 3)
    assert play(stage, restarts=2) == 128 + signal.SIGKILL
    assert len(stage.overrides) == 3


def test_a_crash_without_a_word_is_a_loss(play: Play) -> None:
    assert play(Stage((1, EXCHANGE_FAILED), (0, 0)), restarts=1) == 0


def test_an_error_that_a_worker_tells_of_ends_the_run(play: Play, tmp_path: Path) -> None:
    tell(tmp_path, 0, 1, "TrainingStopped: not finite")
    stage = Stage((1, EXCHANGE_FAILED), (0, 0))
    assert play(stage, restarts=5) == 1
    assert len(stage.overrides) == 1
    assert gangs(tmp_path)[0][0]["reason"] == "TrainingStopped: not finite"


def test_the_word_of_an_earlier_gang_counts_for_nothing(play: Play, tmp_path: Path) -> None:
    tell(tmp_path, 0, 99, "TrainingStopped: not finite")
    assert play(Stage((1, EXCHANGE_FAILED), (0, 0)), restarts=5) == 0


def test_a_wrong_configuration_ends_the_run(play: Play) -> None:
    assert play(Stage((2, 2), (0, 0)), restarts=5) == 2


def test_workers_that_all_lost_each_other_start_again(play: Play) -> None:
    assert play(Stage((EXCHANGE_FAILED, EXCHANGE_FAILED), (0, 0)), restarts=1) == 0


def test_the_exit_code_is_that_of_the_worker_at_fault(play: Play) -> None:
    assert play(Stage((EXCHANGE_FAILED, KILLED))) == 128 + signal.SIGKILL
    assert play(Stage((EXCHANGE_FAILED, 2))) == 2
    assert play(Stage((EXCHANGE_FAILED, 0))) == EXCHANGE_FAILED


def test_those_that_wait_for_a_lost_one_are_asked_to_end(play: Play, tmp_path: Path) -> None:
    stage = Stage((KILLED, None))
    assert play(stage) == 128 + signal.SIGKILL
    assert stage.workers[1].signals == [signal.SIGTERM]
    assert not gangs(tmp_path)[0][1]["was_lost"]


def test_one_that_hangs_is_killed_once_another_has_saved(play: Play, tmp_path: Path) -> None:
    stage = Stage((None, EXCHANGE_FAILED), (0, 0), answers=False)
    assert play(stage, restarts=1) == 0
    assert [worker["code"] for worker in gangs(tmp_path)[0]] == [KILLED, EXCHANGE_FAILED]


@pytest.mark.parametrize("resume", ["never", "run/step_000010"])
def test_a_run_without_a_state_of_its_own_begins_again_as_the_command_says(
    play: Play, tmp_path: Path, resume: str
) -> None:
    for folder in ("step_000010", "step_000030", f"{RANKS}/1/step_000031"):
        (tmp_path / folder).mkdir(parents=True)
    old = tmp_path / RANKS / "1" / "step_000031"
    stage = Stage(
        *[(KILLED, EXCHANGE_FAILED)] * 2,
        at_start=lambda: old.exists() and old.rename(tmp_path / old.name),  # as rank 0 adopts it
    )
    assert play(stage, restarts=1, resume=resume) != 0
    assert stage.overrides[1] == (f"checkpoint.resume={resume}",)


@pytest.mark.parametrize("saved", ["step_000012", f"{RANKS}/1/step_000012"])
def test_a_run_goes_on_with_what_its_first_gang_has_saved(play: Play, tmp_path: Path, saved: str) -> None:
    (tmp_path / "step_000010").mkdir()
    stage = Stage(
        *[(KILLED, EXCHANGE_FAILED)] * 2,
        at_start=lambda: (tmp_path / saved).mkdir(parents=True, exist_ok=True),
    )
    assert play(stage, restarts=1, resume="run/step_000010") != 0
    assert stage.overrides[1] == ("checkpoint.resume=auto",)


def test_a_run_that_has_set_the_former_one_aside_goes_on_with_its_own(play: Play, tmp_path: Path) -> None:
    old = tmp_path / "step_000010"
    old.mkdir()
    stage = Stage(
        *[(KILLED, EXCHANGE_FAILED)] * 2,
        at_start=lambda: old.exists() and old.rename(tmp_path / "aside_step_000010.0"),
    )
    assert play(stage, restarts=1, resume="never") != 0
    assert stage.overrides[1] == ("checkpoint.resume=auto",)


def test_one_signal_asks_all_to_end_and_starts_none_again(play: Play) -> None:
    interrupts, stage = Interrupts(), Stage((None, None), (0, 0))
    threading.Timer(0.05, lambda: interrupts.received.append(signal.SIGINT)).start()
    assert play(stage, restarts=5, interrupts=interrupts) == 0
    assert [worker.signals for worker in stage.workers] == [[signal.SIGTERM]] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("codes", [(TERMINATED, TERMINATED), (-signal.SIGINT, 130), (EXCHANGE_FAILED, 130), (130, 0)])
def test_workers_that_die_of_the_signal_while_they_load_leave_its_own_exit_code_and_no_reason(
    play: Play, capsys: pytest.CaptureFixture[str], codes: tuple[int, int], number: int
) -> None:
    interrupts = Interrupts()
    stage = Stage(codes, answers=False, at_start=lambda: interrupts.received.append(number))
    assert play(stage, restarts=5, interrupts=interrupts) == 128 + number
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("codes", [(1, TERMINATED), (EXCHANGE_FAILED, EXCHANGE_FAILED), (KILLED, TERMINATED)])
def test_other_ends_after_a_signal_are_told(
    play: Play, capsys: pytest.CaptureFixture[str], codes: tuple[int, int]
) -> None:
    interrupts = Interrupts()
    stage = Stage(codes, answers=False, at_start=lambda: interrupts.received.append(signal.SIGINT))
    assert play(stage, restarts=5, interrupts=interrupts) not in (0, 130)
    assert "rank 0" in capsys.readouterr().err


def test_a_second_signal_kills_all_and_shows_the_cursor(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setattr(interrupts_module, "STANDARD_OUTPUT", theirs)
    interrupts, stage = Interrupts(), Stage((None, None), (0, 0), answers=False)
    for seconds in (0.05, 0.1):
        threading.Timer(seconds, lambda: interrupts.received.append(signal.SIGINT)).start()
    assert play(stage, restarts=5, interrupts=interrupts) == 130
    assert [worker.poll() for worker in stage.workers] == [KILLED] * 2
    os.set_blocking(ours, False)
    assert os.read(ours, 100) == b"\x1b[?25h\r\n"
    os.close(ours)
    os.close(theirs)


def test_a_larger_gang_costs_no_restart(play: Play) -> None:
    stage = Stage((None, 0), (0, 0, 0), grows=True)
    assert play(stage) == 0
    assert stage.workers[0].signals == [signal.SIGTERM]
    assert len(stage.workers) == 5


def test_workers_without_a_place_end_the_run_for_now(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(Stage()) == EXCHANGE_FAILED
    assert "no place" in capsys.readouterr().err
