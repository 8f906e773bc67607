"""Recurrent and convolution states of the sequences that decode together: a row for each, in the order of the batch.

A state has no positions, so nothing hides what a row computes that is not a sequence's: arrays are never written in
place. A step reads the first rows of the arrays before it and leaves new ones; sequences that have joined and do not
run yet are set aside meanwhile, and rows that fill up a forward are dropped when a sequence joins.

mlx-lm's models see an `ArraysCache`. Every sequence feeds one token, so there is no padding to mask.

Axes: S rows, B rows of the forward.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class StateCache(ArraysCache):
    """One layer's states of all sequences of a batch."""

    def __init__(self, states: Sequence[mx.array] = ()) -> None:
        super().__init__(0)
        self.arrays = list(states)
        self._waiting: list[mx.array] = []  # rows of sequences that the step at work leaves out

    @property
    def arrays(self) -> list[mx.array]:
        """States (S, ...) in the order of the layer's own cache; empty before the first sequence."""
        arrays: list[mx.array] = self.cache
        return arrays

    @arrays.setter
    def arrays(self, arrays: list[mx.array]) -> None:
        self.cache = arrays

    @property
    def num_rows(self) -> int:
        return self.arrays[0].shape[0] if self.arrays else 0

    def join(self, num_sequences: int, prompts: ArraysCache, rows: Sequence[int]) -> None:
        """Add a copy of the states of each of `rows` of computed prompts after those of `num_sequences`."""
        joining = [_taken(array, rows) for array in prompts.cache]
        if num_sequences == 0:
            self.arrays = joining
        else:
            pairs = zip(self.arrays, joining, strict=True)
            self.arrays = [mx.concatenate([array[:num_sequences], new]) for array, new in pairs]

    def leave(self, kept: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.arrays = [_taken(array, kept) for array in self.arrays]

    def begin_step(self, num_running: int, num_sequences: int, num_rows: int) -> None:
        """Prepare a forward of `num_rows`, the first of which are those of the running sequences."""
        self._waiting = [array[num_running:num_sequences] for array in self.arrays if num_running < num_sequences]
        self.arrays = [_resized(array, num_rows) for array in self.arrays]

    def end_step(self, num_running: int) -> None:
        """Put back the rows that were left out."""
        if self._waiting:
            pairs = zip(self.arrays, self._waiting, strict=True)
            self.arrays, self._waiting = [mx.concatenate([new[:num_running], old]) for new, old in pairs], []


def _taken(array_SX: mx.array, rows: Sequence[int]) -> mx.array:
    """Rows of an array: a view where they are the first ones."""
    if list(rows) == list(range(len(rows))):
        return array_SX[: len(rows)]
    return mx.take(array_SX, mx.array(list(rows), mx.int32), axis=0)


def _resized(array_SX: mx.array, num_rows: int) -> mx.array:
    missing = num_rows - array_SX.shape[0]
    if missing <= 0:
        return array_SX[:num_rows] if missing else array_SX
    return mx.concatenate([array_SX, mx.zeros((missing, *array_SX.shape[1:]), array_SX.dtype)])
