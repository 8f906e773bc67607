"""LoRA of rows that may use different adapters, as two CUDA kernels for all sites that get the same input.

Matrix products of rank 16 cost the host more than the device: each takes 8 microseconds to be handed over, and a layer
has eleven of them. These kernels take 2 and serve a group of sites at once: `shrink` multiplies a group's input by all
its A, unless `small_batch_gemm` has done so; `expand` splits the base's joined output into the sites' own and adds what
the rows' B make of it. Where that output comes in parts, `expand` adds them up. They are named as in vLLM, after Punica
(https://arxiv.org/abs/2310.18547).

Axes: B rows, T tokens, V versions, N numbers (see `pack_lora`), I input, O output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from parallm.model.kernels.cuda import MIN_ON_DEVICE, PACK, VECTOR_BYTES, interned_array, kernel
from parallm.model.kernels.segmented_lora import COLUMNS, EXPAND_THREADS, MAX_WARPS, expand_source, shrink_source
from parallm.model.lora.packed import PackedGroup, PackedLayout, PackedLora, Targets

MAX_PARTS = 16  # of a sum, which `expand` adds up
MIN_CHUNK = 256  # of the input that a block of `shrink` takes: a vector for each lane of a warp
NO_ADAPTER = -1  # as the version of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWeights:
    """Of one group."""

    layout: PackedGroup
    starts: mx.array
    """`layout.starts`, int32, filled up to what MLX keeps on the device."""
    array_VN: mx.array
    """The one that has them."""

    @property
    def is_sorted(self) -> bool:
        """With one version rows stay in their order: that saves waiting for their numbers."""
        return self.array_VN.shape[0] > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedStructure:
    """What `SegmentedLora` have in common for which the same operations are computed, but for the shapes of arrays."""

    layout: PackedLayout

    def lora(self, arrays: Sequence[mx.array]) -> "SegmentedLora":
        """The view with other arrays, which `SegmentedLora.arrays` gave."""
        order_B2, *weights = arrays
        return SegmentedLora(weights=PackedLora(layout=self.layout, arrays=tuple(weights)), order_B2=order_B2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedLora:
    """View of rows that use different versions of the factors. Applied by groups of sites, see `MergedLinear`."""

    weights: PackedLora
    order_B2: mx.array
    """See `order_rows`."""

    def of_group(self, targets: Targets) -> GroupWeights | None:
        """A group's factors; None: there are none."""
        layout = self.weights.layout.groups.get(targets)
        if layout is None:
            return None
        return GroupWeights(layout=layout, starts=_starts(layout.starts), array_VN=self.weights.arrays[layout.array])

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order in which `SegmentedStructure.lora` takes them."""
        return [self.order_B2, *self.weights.arrays]

    def structure(self) -> SegmentedStructure:
        return SegmentedStructure(layout=self.weights.layout)

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        """`y`: `pack_lora` refuses an adapter of a site in no group, and sites of a group do not come here."""
        return y

    def dora_scale(self, target: str) -> None:
        return None


def order_rows(index_B: Sequence[int], num_versions: int) -> mx.array:
    """Each row, which uses version `index_B[b]` or none where that is -1, and that number, int32 (B, 2).

    If there are several, rows of a version stand beside each other, so that blocks of the kernels read factors for
    several rows at once. What is behind the rows only keeps the array on the device.
    """
    pairs = list(enumerate(index_B))
    if num_versions > 1:
        pairs.sort(key=lambda pair: pair[1])
    missing = -(-MIN_ON_DEVICE // 2) - len(pairs)
    return interned_array((*pairs, *[(0, NO_ADAPTER)] * missing), mx.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkOutput:
    """A group's LoRA for some rows, as far as A."""

    weights: GroupWeights
    order_B2: mx.array
    hidden_PBTK: mx.array
    """See `shrink`."""

    def inputs(self) -> dict[str, mx.array]:
        return {
            "hidden": self.hidden_PBTK,
            "order": self.order_B2,
            "starts": self.weights.starts,
            "factors": self.weights.array_VN,
        }


class GroupOutput:
    """What the base's joined product of a group's sites and its rows' adapters come to."""

    def __init__(self, y_SBTO: mx.array, dtype: mx.Dtype, widths: Sequence[int], lora: ShrinkOutput | None) -> None:
        """`y_SBTO` are parts of the product that are still to be added up; `dtype` is that of the outputs."""
        self._y_SBTO, self._dtype, self._widths, self._lora = y_SBTO, dtype, tuple(widths), lora
        self._ranks = lora.weights.layout.ranks if lora else ()

    def apart(self) -> list[mx.array]:
        """The outputs of each site, (B, T, O)."""
        names = [f"out{target}" for target in range(len(self._widths))]
        return self._expanded(names, self._widths, sum(self._widths) * self._dtype.size // VECTOR_BYTES)

    def gated(self) -> mx.array:
        """SwiGLU of two sites of the same width (B, T, O): silu of the first by the second."""
        threads = 2 * -(-self._widths[0] * self._dtype.size // VECTOR_BYTES // 32) * 32  # a warp for each
        return self._expanded(["product"], self._widths[:1], threads)[0]

    def added_to(self, other: mx.array) -> mx.array:
        """The output of a group's only site, and `other` (B, T, O) of that type, rounded once."""
        threads = self._widths[0] * self._dtype.size // VECTOR_BYTES
        return self._expanded(["out0"], self._widths, threads, {"other": other})[0]

    def _expanded(
        self, names: Sequence[str], widths: Sequence[int], threads: int, apply: dict[str, mx.array] | None = None
    ) -> list[mx.array]:
        splits, *rows, _ = self._y_SBTO.shape
        num_rows = rows[0] * rows[1]
        tile = _tile(num_rows) if len(self._widths) > 1 else 2  # the outputs of one site make few blocks
        inputs = {"y": self._y_SBTO} | (apply or {}) | (self._lora.inputs() if self._lora else {})
        is_gated = len(names) < len(self._widths)
        key = "_".join(str(number) for number in (*self._widths, *self._ranks))
        source = expand_source(self._widths, self._ranks, gated=is_gated, adds=apply is not None)
        expand = kernel(f"expand_{names[0]}_{key}", tuple(inputs), tuple(names), source, PACK)
        return expand(
            inputs=list(inputs.values()),
            template=[
                ("T", self._dtype),
                ("Y", self._y_SBTO.dtype),
                ("SPLITS", splits),
                ("TILE", tile),
                ("K", sum(self._ranks)),
                ("SORTED", self._lora is not None and self._lora.weights.is_sorted),
            ],
            grid=(-(-threads // EXPAND_THREADS) * EXPAND_THREADS, -(-num_rows // tile), 1),
            threadgroup=(EXPAND_THREADS, 1, 1),
            output_shapes=[(*rows, width) for width in widths],
            output_dtypes=[self._dtype] * len(names),
        )


def shrink(x_BTI: mx.array, weights: GroupWeights, order_B2: mx.array) -> mx.array:
    """The input's products with A, in parts that are still to be added up, float32 (P, B, T, V K): of each row those
    with its own version's, all others are undefined."""
    rows, tokens, inputs = x_BTI.shape
    columns, chunk, tile = sum(weights.layout.ranks), MIN_CHUNK, _tile(rows * tokens)
    while -(-inputs // chunk) > MAX_PARTS:
        chunk *= 2
    threads, num_parts = 32 * min(columns // COLUMNS, MAX_WARPS), -(-inputs // chunk)
    given = {"x": x_BTI, "order": order_B2, "starts": weights.starts, "factors": weights.array_VN}
    (hidden_PBTK,) = kernel("shrink", tuple(given), ("hidden",), shrink_source(), PACK)(
        inputs=list(given.values()),
        template=[
            ("T", x_BTI.dtype),
            ("TILE", tile),
            ("K", columns),
            ("CHUNK", chunk),
            ("SORTED", weights.is_sorted),
        ],
        grid=(-(-rows * tokens // tile) * threads, num_parts, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(num_parts, rows, tokens, weights.array_VN.shape[0] * columns)],
        output_dtypes=[mx.float32],
    )
    return hidden_PBTK


def _tile(rows: int) -> int:
    """Rows that a block serves."""
    return 4 if rows <= 64 else 8


@cache
def _starts(starts: tuple[int, ...]) -> mx.array:
    """The same array for every trace, for good: a model has as many as groups."""
    return mx.array(starts + (0,) * (MIN_ON_DEVICE - len(starts)), mx.int32)
