"""The thread that writes completions: bounds on disk and in memory, what it drops, what it leaves alone."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parallm.errors import RolloutsDamaged, UnknownObject
from parallm.metrics.rollout_files import RolloutFiles, steps_to_remove
from parallm.metrics.rollout_folder import RolloutFolder, file_name
from parallm.metrics.rollout_format import StepRollouts, encode
from parallm.metrics.rollout_writer import (
    DECODING_RATIO,
    LATE_RATIO,
    MAX_LATE,
    MAX_SLEEP,
    MAX_WAIT,
    MAX_WAITING,
    POLL,
    QUIET_RATIO,
    Throttle,
)
from parallm.metrics.token_texts import TokenTexts
from tests.metrics.test_rollout_format import STEP

Make = Callable[..., RolloutFiles]
Decode = Callable[[Sequence[Sequence[int]]], list[str]]


def letters(rows: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(chr(97 + token) for token in tokens) for tokens in rows]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RolloutFiles] = []

    def build(max_bytes: int = 1 << 20, decode: Decode = letters, **values: object) -> RolloutFiles:
        values, texts = {"is_decoding": lambda: False} | values, TokenTexts(decode)

        def encoded(rollouts: StepRollouts, throttle: Callable[[], object]) -> bytes:
            return encode(rollouts, texts.cut, throttle)

        made.append(RolloutFiles(tmp_path, encoded, max_bytes=max_bytes, **values))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for files in made:
        files.close()


def written(tmp_path: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (tmp_path / "rollouts").glob("*"))


def test_steps_are_written_and_read(make: Make, tmp_path: Path) -> None:
    files = make()
    for step in (1, 2, 3):
        files.put(replace(STEP, step=step))
    files.close()
    assert written(tmp_path) == [1, 2, 3]
    for folder in (files.reading, RolloutFolder(tmp_path / "rollouts")):
        assert [row["step"] for row in folder.listing().steps] == [1, 2, 3]
        assert folder.read(2).tokens(0, 0).texts == ["b", "c", "d"]
        with pytest.raises(UnknownObject, match="no completions of step 4"):
            folder.read(4)


def test_no_step_waits_for_the_writer_and_what_is_too_much_is_counted(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on = threading.Event()

    def slow(rows: Sequence[Sequence[int]]) -> list[str]:
        may_go_on.wait(60)
        return letters(rows)

    files = make(decode=slow)
    for step in range(1, 11):
        files.put(replace(STEP, step=step))  # a blocking writer would never come to the end of this
    assert files.num_dropped == 10 - MAX_WAITING
    assert files.reading.listing().num_dropped == 6
    may_go_on.set()
    files.close()
    assert written(tmp_path) == [1, 2, 3, 4]
    assert [text for text in caplog.messages if "are not written" in text and "metrics.rollouts=some" in text] != []


def test_the_folder_is_bounded_and_thinned_out_evenly(make: Make, tmp_path: Path) -> None:
    files = make(max_bytes=1 << 20, evaluated=[11])
    files.put(replace(STEP, step=1))
    files.close()
    size = (tmp_path / "rollouts" / file_name(1)).stat().st_size
    files = make(max_bytes=12 * size + 100, evaluated=[11])
    for step in range(2, 101):
        files.put(replace(STEP, step=step))
        files.close()
    kept = written(tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "rollouts").glob("*")) <= 12 * size + 100
    assert (kept[0], kept[-1], 11 in kept) == (1, 100, True)
    assert max(second - first for first, second in itertools.pairwise(kept)) <= 32
    assert [row["step"] for row in RolloutFolder(tmp_path / "rollouts").listing().steps] == kept


def test_faults_and_evaluations_stay_as_long_as_others_can_go() -> None:
    sizes = dict.fromkeys(range(1, 8), 10)
    assert steps_to_remove(sizes, {2, 4}, 40) == [3, 5, 6]
    assert steps_to_remove(sizes, set(sizes), 40) == [2, 4, 6]
    assert steps_to_remove(sizes, set(), 70) == []
    assert steps_to_remove({1: 10, 2: 10}, set(), 1) == []


def test_a_resumed_run_removes_the_steps_that_it_takes_again(make: Make, tmp_path: Path) -> None:
    files = make()
    for step in (1, 2, 3, 4):
        files.put(replace(STEP, step=step))
    files.close()
    (tmp_path / "rollouts" / "step_000009.tmp").write_bytes(b"half")
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    resumed = make()
    resumed.go_on_after(2)
    resumed.put(replace(STEP, step=3, time=9.0))
    resumed.close()
    (tmp_path / "rollouts" / "notes.txt").unlink()
    assert written(tmp_path) == [1, 2, 3]
    assert resumed.reading.read(3).summary["time"] == 9.0
    assert [row["time"] for row in resumed.reading.listing().steps] == [5.0, 5.0, 9.0]


def test_a_disk_that_refuses_costs_a_warning_and_the_newest_stay_in_memory(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollouts").write_text("a file stands where the folder should be")
    files = make()
    for step in (1, 2):
        files.put(replace(STEP, step=step))
    files.close()
    assert files.reading.read(2).summary["step"] == 2
    assert [row["step"] for row in files.reading.listing().steps] == [1, 2]
    assert len([text for text in caplog.messages if "cannot write to" in text]) == 1


def test_a_writer_that_fails_ends_nothing(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(rows: Sequence[Sequence[int]]) -> list[str]:
        if any(4 in tokens for tokens in rows):
            raise ValueError("no such token")
        return letters(rows)

    files = make(decode=broken)
    files.put(STEP)
    files.put(replace(STEP, step=8, groups=[]))
    files.close()
    assert written(tmp_path) == [8]
    assert "the completions of a step could not be written" in caplog.messages


def test_a_damaged_file_does_not_hide_the_others(make: Make, tmp_path: Path) -> None:
    files = make()
    for step in (1, 2, 3, 4, 5):
        files.put(replace(STEP, step=step))
        files.close()
    folder = tmp_path / "rollouts"
    (folder / file_name(2)).write_bytes(b"\xff" * 100)
    (folder / file_name(3)).unlink()
    (folder / file_name(3)).symlink_to("/etc/passwd")
    (folder / file_name(4)).unlink()
    os.mkfifo(folder / file_name(4))
    listing = RolloutFolder(folder).listing()
    assert [row["step"] for row in listing.steps] == [1, 5]
    assert sorted(listing.damaged) == [2, 3, 4]
    for step in (2, 3, 4):
        with pytest.raises(RolloutsDamaged):
            RolloutFolder(folder).read(step)


def test_a_folder_that_does_not_exist_has_no_steps(tmp_path: Path) -> None:
    assert RolloutFolder(tmp_path / "none").listing().steps == []


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of a writer each of whose pieces takes 5 ms."""
    found, clock = list[float](), itertools.count(step=0.005)
    monkeypatch.setattr("parallm.metrics.rollout_writer.time.thread_time", lambda: next(clock))
    monkeypatch.setattr("parallm.metrics.rollout_writer.time.sleep", found.append)
    return found


def test_a_throttled_thread_sleeps_in_proportion_to_its_work(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, is_decoding = [0], [False]
    throttle = Throttle(lambda: waiting[0], lambda: is_decoding[0])
    throttle()
    assert slept == [pytest.approx(QUIET_RATIO * 0.005)]
    waiting[0] = MAX_LATE
    throttle()
    is_decoding[0] = True
    throttle()
    assert slept[1:] == [pytest.approx(QUIET_RATIO * 0.005), pytest.approx(LATE_RATIO * 0.005)]
    waiting[0] = MAX_LATE + 1
    throttle()
    assert slept[3:] == [0.0]
    waiting[0], is_decoding[0] = 0, False
    clock = iter((10.0, 10.0))
    monkeypatch.setattr("parallm.metrics.rollout_writer.time.thread_time", lambda: next(clock))
    throttle()
    assert slept[4:] == [MAX_SLEEP]


def test_a_throttled_thread_waits_for_the_end_of_decoding_but_not_for_ever(slept: list[float]) -> None:
    waiting = [0]
    answers: Iterator[bool] = itertools.repeat(True)
    throttle = Throttle(lambda: waiting[0], lambda: next(answers))
    answers = iter([True, True, False, False])
    throttle()
    assert slept == [POLL, POLL, pytest.approx(QUIET_RATIO * 0.005)]
    slept.clear()
    answers = itertools.repeat(True)
    throttle()
    assert slept.pop() == pytest.approx(DECODING_RATIO * 0.005)
    assert sum(slept) == pytest.approx(MAX_WAIT - 2 * POLL, abs=POLL)
    slept.clear()
    throttle()
    assert slept == [pytest.approx(DECODING_RATIO * 0.005)], "it has waited long enough for this file"
    later = Throttle(lambda: waiting[0], lambda: True)
    waiting[0] = 1
    later()
    assert slept[1:] == [pytest.approx(LATE_RATIO * 0.005)], "another step waits"


def test_the_writer_is_throttled_until_several_steps_wait(make: Make, slept: list[float]) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(rows: Sequence[Sequence[int]]) -> list[str]:
        begun.set()
        may_go_on.wait(60)
        return letters(rows)

    def wait_for(files: RolloutFiles) -> float:
        """How long the writer has slept until nothing waits."""
        may_go_on.set()
        while files._num_waiting:
            threading.Event().wait(0.001)
        seconds = sum(slept)
        slept.clear()
        return seconds

    files = make(decode=slow)
    files.put(STEP)
    assert wait_for(files) > 0.005 * sum(len(group.trajectories) for group in STEP.groups)
    files.put(STEP)  # its tokens are known now
    of_one = wait_for(files)
    for event in (begun, may_go_on):
        event.clear()
    files.put(replace(STEP, step=8))
    begun.wait(60)
    for step in (9, 10):
        files.put(replace(STEP, step=step))
    before_the_first = QUIET_RATIO * 0.005
    assert wait_for(files) == pytest.approx(before_the_first + 2 * of_one), "the first of three has made haste"


def test_a_writer_that_is_closed_makes_haste(make: Make) -> None:
    files = make(is_decoding=lambda: True)
    began = time.monotonic()
    for step in (7, 8):
        files.put(replace(STEP, step=step))
    files.close()
    assert time.monotonic() - began < MAX_WAIT / 2
    assert files._num_waiting == 0


def test_an_evaluated_step_is_no_step_that_waits(make: Make, slept: list[float]) -> None:
    files = make(is_decoding=lambda: True)
    files.put(STEP)
    files.keep(STEP.step)
    while files._num_waiting:
        threading.Event().wait(0.001)
    assert sum(slept) >= MAX_WAIT
