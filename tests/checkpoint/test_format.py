import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from parallm.checkpoint.format import OPTIMIZER, needed_bytes, read_checkpoint, write_checkpoint
from parallm.checkpoint.state import TrainingState
from parallm.model.adapters.files import read_adapter

MakeState = Callable[..., TrainingState]


def round_trip(state: TrainingState, folder: Path) -> TrainingState:
    write_checkpoint(state, folder)
    return read_checkpoint(folder)


def test_everything_but_arrays_comes_back_equal(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12, score=0.75)
    read = round_trip(state, tmp_path)
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("adapter", "optimizer")]
    assert {name: getattr(read, name) for name in names} == {name: getattr(state, name) for name in names}


def test_the_adapter_comes_back_bit_for_bit(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12)
    read = round_trip(state, tmp_path).adapter
    assert (read.digest, read.version, read.parent, read.step) == (state.adapter.digest, 12, 11, 12)


def test_optimizer_arrays_come_back_bit_for_bit_with_their_types(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12)
    read = round_trip(state, tmp_path).optimizer
    assert {name: array.dtype for name, array in read.items()} == {
        name: array.dtype for name, array in state.optimizer.items()
    }
    assert {name: bits(array) for name, array in read.items()} == {
        name: bits(array) for name, array in state.optimizer.items()
    }


def test_equal_arrays_make_equal_files_in_whatever_order_they_come(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12)
    turned = dataclasses.replace(state, optimizer=dict(sorted(state.optimizer.items(), reverse=True)))
    for name, one in (("one", state), ("other", turned)):
        (tmp_path / name).mkdir()
        write_checkpoint(one, tmp_path / name)
    assert (tmp_path / "one" / OPTIMIZER).read_bytes() == (tmp_path / "other" / OPTIMIZER).read_bytes()


def test_a_state_before_the_first_update_comes_back(make_state: MakeState, tmp_path: Path) -> None:
    read = round_trip(dataclasses.replace(make_state(0), optimizer={}, counters={}), tmp_path)
    assert (read.optimizer, read.counters) == ({}, {})


def test_the_adapter_folder_can_be_loaded_by_itself(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12)
    write_checkpoint(state, tmp_path)
    assert read_adapter(tmp_path / "adapter").digest == state.adapter.digest


def test_counters_that_are_not_finite_come_back_equal(make_state: MakeState, tmp_path: Path) -> None:
    counters = {"guard": {"entropies": [math.nan, 0.5, math.inf]}, "best": -math.inf, "mean": math.nan}
    read = round_trip(dataclasses.replace(make_state(1, score=math.nan), counters=counters), tmp_path)
    assert repr(read.counters) == repr(counters)
    assert read.score is not None
    assert math.isnan(read.score)


@pytest.mark.parametrize("counters", [{"random": (1, 2)}, {"seeds": {1: 2}}, {"guard": {"rates": [(0.5,)]}}])
def test_counters_that_json_would_change_are_refused(
    make_state: MakeState, counters: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="would not come back equal"):
        write_checkpoint(dataclasses.replace(make_state(1), counters=counters), tmp_path)


def test_the_estimate_of_the_size_covers_the_files(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(12)
    write_checkpoint(state, tmp_path)
    assert needed_bytes(state) >= sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


def bits(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8) if array.ndim else array).tobytes()
