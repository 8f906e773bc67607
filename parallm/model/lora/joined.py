"""Products with the matrices A of targets that get the same input, and the form that LoRA weights have in products.

Axes: E experts, I input, R rank, K ranks of joined targets side by side.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import mlx.core as mx

from parallm.model.attention import MIN_COLUMNS
from parallm.model.kernels.cuda import on_cuda

Multiply = Callable[[mx.array, mx.array], mx.array]


class JoinedA:
    """Targets that are called with the same input, one after the other: one product with all their A serves them."""

    def __init__(self, targets: tuple[str, ...], cuts: tuple[int, ...] | None, a_IK: mx.array) -> None:
        """`cuts` are the columns at which a target's A ends and the next one's begins; None: B of each target takes the
        columns of all, and has zeros for those of others. A of experts is (E, I, K)."""
        self.targets, self.cuts, self.a_IK = targets, cuts, a_IK
        self._x: mx.array | None = None  # the input that the parts are of; nothing is kept when all are fetched
        self._parts: dict[str, mx.array] = {}

    def product(self, target: str, x: mx.array, multiply: Multiply = operator.matmul) -> mx.array:
        """`x` (..., I) times A of `target`, (..., R); `multiply` makes the product (..., K) of `x` and all A."""
        if self._x is not x or target not in self._parts:
            self._x = x
            self._parts = self.split(multiply(x, self.a_IK))
        part = self._parts.pop(target)
        if not self._parts:
            self._x = None
        return part

    def split(self, columns: mx.array) -> dict[str, mx.array]:
        """The columns (..., K) that B of each target takes."""
        if not self.cuts:
            return dict.fromkeys(self.targets, columns)
        return dict(zip(self.targets, mx.split(columns, list(self.cuts), axis=-1), strict=True))


def join_a(a_IR: Mapping[str, mx.array]) -> JoinedA:
    """The matrices A of targets that get the same input, beside each other."""
    return JoinedA(tuple(a_IR), cuts_of(a_IR), mx.concatenate(list(a_IR.values()), axis=-1))


def cuts_of(a_IR: Mapping[str, mx.array]) -> tuple[int, ...]:
    """The columns between matrices A beside each other."""
    return tuple(accumulate(a.shape[-1] for a in a_IR.values()))[:-1]


def computed_rank(rank: int) -> int:
    """A CPU may round products of fewer columns in another way for each number of rows; kernels read eight at once."""
    if mx.default_device() == mx.Device(mx.cpu):
        return max(rank, MIN_COLUMNS)
    return rank + -rank % 8 if on_cuda() else rank


def present_groups(groups: Sequence[tuple[str, ...]], a_IR: Mapping[str, mx.array]) -> list[list[str]]:
    """The groups without targets that the adapter lacks; a single target is no group."""
    present = [[target for target in group if target in a_IR] for group in groups]
    return [group for group in present if len(group) > 1]


def padded(matrix: mx.array, axis: int, before: int, size: int) -> mx.array:
    """`matrix` (.., rows, columns) with zeros around it along `axis`, `before` of them in front."""
    missing = (before, max(0, size - before - matrix.shape[axis]))
    widths = [missing if axis % matrix.ndim == dimension else (0, 0) for dimension in range(matrix.ndim)]
    return mx.pad(matrix, widths) if any(missing) else matrix
