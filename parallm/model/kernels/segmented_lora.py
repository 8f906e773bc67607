"""LoRA of rows that use different adapters, as two CUDA kernels for all targets that get the same input.

Matrix products of rank 16 cost the host more than the device: each takes 8 microseconds to be handed over, and a layer
has eleven of them. These kernels take 2 and serve a group of targets at once: `shrink` multiplies a group's input by
all its A, unless `small_batch_gemm` has done so; `expand` splits the base's joined output into the targets' own and
adds the product with the rows' B. Where that output comes in parts, `expand` adds them up. They are named as in vLLM,
after Punica (https://arxiv.org/abs/2310.18547).

Axes: B rows, T tokens, M tokens of all rows, V versions, N numbers (see `lora/segmented.py`), I input, O output, P
parts of a sum, S parts of the base's output, K ranks of a group's targets side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from parallm.model.kernels.columns import Columns, shaped
from parallm.model.kernels.cuda import MIN_ON_DEVICE, VECTOR_BYTES, has_kernels, kernel

Targets = tuple[str, ...]

COLUMNS = 8  # of A that a warp of `shrink` multiplies by
MAX_WARPS = 8  # of a block of `shrink`
EXPAND_THREADS = 64  # of a block
COPY_THREADS = 256
MAX_PARTS = 16  # of a sum, which `expand` adds up
MIN_CHUNK = 256  # of the input that a block of `shrink` takes: a vector for each lane of a warp


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """Targets with one input, and where their weights are among a version's."""

    targets: Targets
    ranks: tuple[int, ...]
    """One for each target."""
    widths: tuple[int, ...]
    """Outputs of each target."""
    array: int
    """Index of the version's array that holds them."""
    starts: tuple[int, ...]
    """First index of A (K, I), all targets' below each other, then of each target's B (R, O), which has the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWeights:
    """LoRA weights of one group, of one or several versions."""

    layout: PackedGroup
    array_VN: mx.array

    @property
    def starts(self) -> mx.array:
        """`layout.starts`, int32, filled up to what MLX keeps on the device."""
        return _starts(self.layout.starts)

    @property
    def num_inputs(self) -> int:
        """I of A (K, I)."""
        return (self.layout.starts[1] - self.layout.starts[0]) // sum(self.layout.ranks)

    def joined_a(self) -> mx.array:
        """A of all targets below each other, (V, K, I)."""
        begin, columns, versions = self.layout.starts[0], sum(self.layout.ranks), self.array_VN.shape[0]
        a_VN = self.array_VN[:, begin : self.layout.starts[1]]
        return a_VN.reshape(versions, columns, -1)

    def joined_b(self) -> mx.array:
        """B of all targets side by side, (V, K, O): each has zeros for the outputs of the others."""
        versions, ranks, widths = self.array_VN.shape[0], self.layout.ranks, self.layout.widths
        if len(ranks) == 1 or not has_kernels():
            places = zip(self.layout.starts[1:], ranks, widths, strict=True)
            parts = [self.array_VN[:, start : start + rank * width] for start, rank, width in places]
            return _side_by_side([part.reshape(versions, -1, width) for part, width in zip(parts, widths, strict=True)])
        shape, dtype = (versions, sum(ranks), sum(widths)), self.array_VN.dtype
        defines = (
            ("T", dtype),
            ("WIDTHS", ", ".join(map(str, widths))),
            ("RANKS", ", ".join(map(str, ranks))),
            ("TARGETS", len(ranks)),
            ("K", shape[1]),
            ("TOTAL", shape[2]),
        )
        threads = math.prod(shape) * dtype.size // VECTOR_BYTES
        (joined_VKO,) = kernel("block_diagonal", defines)(
            [self.starts, self.array_VN],
            self.array_VN.shape,
            grid=(-(-threads // COPY_THREADS) * COPY_THREADS, 1, 1),
            threadgroup=(COPY_THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )
        return joined_VKO

    @property
    def is_sorted(self) -> bool:
        """Rows of one version stay in their order: that saves waiting for their numbers."""
        return self.array_VN.shape[0] > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkOutput:
    """A group's LoRA for some rows after A."""

    weights: GroupWeights
    order_B2: mx.array
    hidden_PBTK: mx.array
    """See `shrink`."""

    def inputs(self) -> list[mx.array]:
        return [self.hidden_PBTK, self.order_B2, self.weights.starts, self.weights.array_VN]


class GroupOutput:
    """The base's joined product of a group's targets, and the product of the rows' adapters."""

    def __init__(self, y_SBTO: mx.array, dtype: mx.Dtype, widths: Sequence[int], lora: ShrinkOutput | None) -> None:
        """`y_SBTO` are parts of the product that are still to be added up; `dtype` is that of the outputs."""
        self._y_SBTO, self._dtype, self._widths, self._lora = y_SBTO, dtype, tuple(widths), lora
        self._ranks = lora.weights.layout.ranks if lora else ()

    def split(self) -> list[mx.array]:
        """The outputs of each target, (B, T, O)."""
        threads = sum(self._widths) * self._dtype.size // VECTOR_BYTES
        return [self._with_rows(output_MO) for output_MO in self._expand(self._widths, threads)]

    def gated(self) -> mx.array:
        """SwiGLU of two targets of the same width (B, T, O): silu of the first by the second."""
        threads = 2 * -(-self._widths[0] * self._dtype.size // VECTOR_BYTES // 32) * 32  # a warp for each
        return self._with_rows(self._expand(self._widths[:1], threads, is_gated=True)[0])

    def added_to(self, other: mx.array) -> mx.array:
        """The sum of a group's only output and `other` (B, T, O) of its type, rounded once. It is a plain array: Python
        would ask `Columns` how to add a `FusedAdd`."""
        threads = self._widths[0] * self._dtype.size // VECTOR_BYTES
        return self._expand(self._widths, threads, other)[0].reshape(other.shape)

    def _with_rows(self, output_MO: mx.array) -> Columns:
        return shaped(output_MO, (*self._y_SBTO.shape[1:3], output_MO.shape[1]))

    def _expand(
        self, widths: Sequence[int], threads: int, other: mx.array | None = None, *, is_gated: bool = False
    ) -> list[mx.array]:
        """Outputs of these widths, (M, O)."""
        splits, *rows, _ = self._y_SBTO.shape
        num_rows = rows[0] * rows[1]
        tile = _tile(num_rows) if len(self._widths) > 1 else 2  # the outputs of one target make few blocks
        inputs, sizes = [self._y_SBTO, *([] if other is None else [other])], [*rows]
        if self._lora:
            inputs += self._lora.inputs()
            sizes = [self._lora.hidden_PBTK.shape[0], *self._lora.weights.array_VN.shape, *rows]
        names = ["product"] if is_gated else [f"out{target}" for target in range(len(widths))]
        defines = (
            ("T", self._dtype),
            ("Y", self._y_SBTO.dtype),
            ("HAS_LORA", bool(self._ranks)),
            ("GATED", is_gated),
            ("ADDS", other is not None),
            ("WIDTHS", ", ".join(map(str, self._widths))),
            ("RANKS", ", ".join(map(str, self._ranks))),
            ("POINTERS", ", ".join(f"T* {name}" for name in names)),
            ("OUTPUTS", ", ".join(names)),
            ("SPLITS", splits),
            ("TILE", tile),
            ("K", sum(self._ranks)),
            ("SORTED", self._lora is not None and self._lora.weights.is_sorted),
            ("TARGETS", len(self._widths)),
            ("TOTAL", sum(self._widths)),
            ("THREADS", EXPAND_THREADS),
        )
        return kernel("expand", defines)(
            inputs,
            sizes,
            grid=(-(-threads // EXPAND_THREADS) * EXPAND_THREADS, -(-num_rows // tile), 1),
            threadgroup=(EXPAND_THREADS, 1, 1),
            output_shapes=[(num_rows, width) for width in widths],
            output_dtypes=[self._dtype] * len(widths),
        )


def shrink(x_BTI: mx.array, weights: GroupWeights, order_B2: mx.array) -> mx.array:
    """The input's products with A, in parts that are still to be added up, float32 (P, B, T, V K). Each row has those
    with its own version's A; all others are undefined."""
    rows, tokens, inputs = x_BTI.shape
    columns, chunk, tile = sum(weights.layout.ranks), MIN_CHUNK, _tile(rows * tokens)
    while -(-inputs // chunk) > MAX_PARTS:
        chunk *= 2
    threads, num_parts = 32 * min(columns // COLUMNS, MAX_WARPS), -(-inputs // chunk)
    defines = (
        ("T", x_BTI.dtype),
        ("TILE", tile),
        ("K", columns),
        ("CHUNK", chunk),
        ("SORTED", weights.is_sorted),
        ("COLUMNS", COLUMNS),
    )
    (hidden_PBTK,) = kernel("shrink", defines)(
        [x_BTI, order_B2, weights.starts, weights.array_VN],
        [rows, tokens, inputs, *weights.array_VN.shape],
        grid=(-(-rows * tokens // tile) * threads, num_parts, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(num_parts, rows, tokens, weights.array_VN.shape[0] * columns)],
        output_dtypes=[mx.float32],
    )
    return hidden_PBTK


def _side_by_side(parts_VRO: Sequence[mx.array]) -> mx.array:
    """Matrices of each version along a diagonal."""
    total, first, rows = sum(part.shape[2] for part in parts_VRO), 0, []
    for part_VRO in parts_VRO:
        end = first + part_VRO.shape[2]
        rows.append(mx.pad(part_VRO, ((0, 0), (0, 0), (first, total - end))) if len(parts_VRO) > 1 else part_VRO)
        first = end
    return mx.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]


def _tile(rows: int) -> int:
    """Rows that a block serves."""
    return 4 if rows <= 64 else 8


@cache
def _starts(starts: tuple[int, ...]) -> mx.array:
    """The same array for every trace; there are as many as a model has groups."""
    return mx.array(starts + (0,) * (MIN_ON_DEVICE - len(starts)), mx.int32)
