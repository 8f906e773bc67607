"""Columns of a run: what a page draws of them, and that nothing a run writes can break or fill them."""

import math
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from parallm.metrics import history as history_module
from parallm.metrics.history import MAX_COLUMNS, History, filled


def made(steps: int, names: int = 1) -> History:
    chance = random.Random(0)
    return filled(
        [{"step": step, **{f"m{name}": chance.random() for name in range(names)}} for step in range(1, steps + 1)]
    )


def test_buckets_hold_minimum_maximum_and_last_of_every_step() -> None:
    history = made(1000)
    values, found = history.view().columns["m0"][:1000], history.view().buckets(100)
    assert found.bucket == 16
    assert found.starts.tolist() == list(range(1, 1001, 16))
    low, high, last = found.columns["m0"]
    for index, start in enumerate(found.starts):
        own = values[start - 1 : start + 15]
        assert (low[index], high[index], last[index]) == (own.min(), own.max(), own[-1])


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 1024, 1025])
def test_there_are_never_more_groups_than_points_and_no_fewer_than_needed(steps: int) -> None:
    found = made(steps).view().buckets(64)
    assert len(found.starts) <= 64
    assert found.bucket == 1 or len(found.starts) > 32


def test_groups_do_not_move_as_a_run_goes_on() -> None:
    """A chart whose groups begin at the newest step jumps with each new one."""
    history = made(1000)
    before = history.view().buckets(64)
    for step in range(1001, 1010):
        history.append({"step": step, "m0": 0.5})
    after = history.view().buckets(64)
    whole = len(before.starts) - 1  # the last one was not full
    assert after.bucket == before.bucket
    for old, new in zip(before.columns["m0"], after.columns["m0"], strict=True):
        assert old[:whole].tolist() == new[:whole].tolist()


def test_gaps_stay_gaps_and_the_last_number_of_a_group_counts() -> None:
    history = History()
    for step in range(1, 9):
        history.append({"step": step, "often": step, **({"seldom": 0.5} if step == 2 else {})})
    found = history.view().buckets(2)
    assert found.bucket == 4
    low, high, last = (column.tolist() for column in found.columns["seldom"])
    assert (low[0], high[0], last[0]) == (0.5, 0.5, 0.5)
    assert all(math.isnan(column[1]) for column in (low, high, last))


def test_a_column_with_one_value_is_sent_once() -> None:
    history = filled([{"step": step, "same": 3, "late": 3 if step > 1 else None} for step in (1, 2, 3)])
    found = history.view().buckets(10)
    assert found.constant == {"same": 3.0}
    assert set(found.columns) == {"late"}


def test_numbers_keep_six_digits_and_times_milliseconds() -> None:
    kept = History().append(
        {"step": 1, "loss": 0.123456789, "time": 1_763_802_345.123456, "big": 10**400, "bad": math.inf}
    )
    assert kept == {"step": 1, "loss": 0.123457, "time": 1_763_802_345.123}


def test_rows_come_as_they_were_reported_and_say_if_there_are_more() -> None:
    view = filled([{"step": step, "a": step, "b": -step} for step in (1, 2, 4, 8, 16)]).view()
    rows = view.rows(1, 8, ["a"], 2)
    assert (rows.steps.tolist(), rows.columns["a"].tolist(), rows.has_more) == ([2, 4], [2, 4], True)
    assert set(view.rows(0, 99, None, 99).columns) == {"a", "b"}
    with pytest.raises(KeyError):
        view.rows(0, 9, ["c"], 9)


def test_steps_that_come_again_begin_a_new_epoch_and_leave_views_as_they_were() -> None:
    history = made(10)
    view, epoch = history.view(), history.epoch
    before = view.rows(0, 99, None, 99).columns["m0"].tolist()
    history.append({"step": 5, "m0": 77})
    assert history.epoch != epoch
    assert view.rows(0, 99, None, 99).columns["m0"].tolist() == before
    assert history.view().rows(0, 99, None, 99).steps.tolist() == [1, 2, 3, 4, 5]
    history.append({"step": 6, "other": 1})
    assert math.isnan(history.view().columns["m0"][5])


def test_appending_keeps_the_epoch() -> None:
    history = made(1)
    epoch = history.epoch
    for step in range(2, 2000):
        history.append({"step": step, "m0": 1})
    history.drop_from(5000)
    assert history.epoch == epoch


@pytest.mark.parametrize("step", [None, "7", 1.5, -1, True, 2**53 + 1, 10**400, math.nan])
def test_a_row_without_a_usable_step_is_named(step: Any) -> None:
    with pytest.raises(ValueError, match=r"step: .* should be a whole number from 0"):
        History().append({"step": step, "a": 1})


def test_a_row_of_ever_new_names_does_not_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    history = History()
    for step in range(1, 50):
        history.append({"step": step, **{f"{step}/{name}": 1.0 for name in range(100)}})
    assert len(history.view().names) == MAX_COLUMNS
    assert len([record for record in caplog.records if "are not drawn" in record.message]) == 1


def test_more_rows_than_fit_are_named_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_CELLS", 1000)
    with pytest.raises(ValueError, match="512 rows of 1 metrics are all that fit here"):
        made(2000)


def test_views_are_whole_while_another_thread_appends() -> None:
    history, torn, stop = History(), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            rows = history.view().rows(0, 10**9, ["a", "b"], 10**9)
            torn.extend(np.flatnonzero(rows.columns["a"] != rows.steps).tolist())

    history.append({"step": 1, "a": 1, "b": 1})
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 5000):
        history.append({"step": step, "a": step, "b": step})
    stop.set()
    reader.join()
    assert torn == []


def test_ten_thousand_steps_are_grouped_in_milliseconds_of_processor_time() -> None:
    view = made(10_000, 42).view()
    began = time.thread_time()
    view.buckets(1024)
    assert time.thread_time() - began < 0.1
