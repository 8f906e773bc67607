"""A row of an array behaves as the tuple of its numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parallm.array_row import ArrayRow, as_array

VALUES = ((5, 2, 5, 9), (True, False, True), (-0.5, 0.1), ())


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    "seen",
    [
        list,
        len,
        repr,
        hash,
        bool,
        lambda row: row[1:-1] == tuple(row)[1:-1],
        lambda row: [row[place] for place in range(-len(row), len(row))],
        lambda row: [row.count(value) for value in (True, 5, 7)],
        lambda row: [value in row for value in (5, 0.1, "x")],
        lambda row: [type(value) for value in row],
        lambda row: as_array(row, np.float32).tolist(),
        lambda row: np.array(row, np.float32).tolist(),
    ],
)
def test_a_row_is_seen_as_a_tuple(values: tuple[Any, ...], seen: Callable[[Sequence[Any]], object]) -> None:
    row = ArrayRow(np.array(values, None if values else np.int32))
    assert seen(row) == seen(values)


def test_rows_are_equal_by_their_numbers() -> None:
    row = ArrayRow(np.array([1, 2]))
    assert row == (1, 2) == row
    assert row == ArrayRow(np.array([1, 2], np.int16))
    assert row != (1, 3)
    assert row != [1, 2], "nor is a tuple"


def test_an_array_of_the_same_type_is_not_copied() -> None:
    values = np.arange(4, dtype=np.int32)
    assert np.shares_memory(as_array(ArrayRow(values), np.int32), values)
    assert not np.shares_memory(np.array(ArrayRow(values)), values)
