"""Numbers of a trajectory in an array: what another worker has sampled is mostly never looked at one by one."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class ArrayRow(Sequence[Any]):
    """A row of an array: a sequence that is equal to the tuple of its numbers, and an array for NumPy. Never changed;
    Python's numbers are made anew whenever they are asked for."""

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray) -> None:
        """`values`: (N,)."""
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return ArrayRow(self._values[index]) if isinstance(index, slice) else self._values[index].item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    def count(self, value: Any) -> int:
        return int(np.count_nonzero(self._values == value))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | ArrayRow) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def sum_of(row: Sequence[Any]) -> float:
    """The sum of a row's numbers, in any order."""
    return float(row.__array__().sum()) if isinstance(row, ArrayRow) else sum(row)


def as_array(row: Sequence[Any], kind: type) -> np.ndarray:
    """The numbers of a row (N,) in this type."""
    return np.asarray(row, kind) if isinstance(row, ArrayRow) else np.fromiter(row, kind, len(row))
