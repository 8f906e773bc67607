"""Numbers of a trajectory in an array: they are mostly never looked at one by one."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class ArrayRow(Sequence[Any]):
    """A row of an array: a sequence that is equal to the tuple of its numbers, and an array for NumPy. Never changed;
    Python's numbers are made anew whenever they are asked for."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        """`array`: (N,); it must not change afterwards."""
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return ArrayRow(self.array[index]) if isinstance(index, slice) else self.array[index].item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def count(self, value: Any) -> int:
        of_value = self.array if value is True and self.array.dtype == np.bool_ else self.array == value
        return int(np.count_nonzero(of_value))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | ArrayRow) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def as_array(row: Sequence[Any], kind: type) -> np.ndarray:
    """The numbers of a row (N,) in this type. Not to be changed."""
    if isinstance(row, ArrayRow):
        return row.array.astype(kind, copy=False)
    return np.fromiter(row, kind, len(row))
