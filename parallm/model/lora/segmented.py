"""LoRA of rows that use any versions, by the CUDA kernels of `kernels/segmented_lora.py` (as SGMV; Punica).

`MergedLinear` applies it, for all targets of one input at once. Axes: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array
from parallm.model.kernels.segmented_lora import GroupWeights, Targets
from parallm.model.lora.packed import PackedLayout, PackedLora

NO_ADAPTER = -1  # as the version of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedStructure:
    """Equal for bindings for which the same operations are computed, but for the shapes of arrays."""

    layout: PackedLayout

    def lora(self, arrays: Sequence[mx.array]) -> "SegmentedLora":
        """The binding with other arrays, in the order of `SegmentedLora.arrays`."""
        order_B2, *weights = arrays
        return SegmentedLora(weights=PackedLora(layout=self.layout, arrays=tuple(weights)), order_B2=order_B2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedLora:
    """Rows use different versions of `weights`."""

    weights: PackedLora
    order_B2: mx.array
    """See `order_rows`."""

    def of_group(self, targets: Targets) -> GroupWeights | None:
        """The weights of a group; None if it has none."""
        layout = self.weights.layout.groups.get(targets)
        return None if layout is None else GroupWeights(layout=layout, array_VN=self.weights.arrays[layout.array])

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order of `SegmentedStructure.lora`."""
        return [self.order_B2, *self.weights.arrays]

    def structure(self) -> SegmentedStructure:
        return SegmentedStructure(layout=self.weights.layout)

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        """`y`: groups apply LoRA to their targets, and `pack_lora` refuses an adapter of other targets."""
        return y

    def dora_scale(self, target: str) -> None:
        return None


def order_rows(index_B: Sequence[int], num_versions: int) -> mx.array:
    """Pairs of each row and its version `index_B[b]` (-1: none), int32 (B, 2).

    If there are several versions, rows of one stand beside each other, so that blocks of the kernels read weights for
    several rows at once. Pairs after the rows only keep the array on the device.
    """
    pairs = list(enumerate(index_B))
    if num_versions > 1:
        pairs.sort(key=lambda pair: pair[1])
    missing = -(-MIN_ON_DEVICE // 2) - len(pairs)
    return interned_array((*pairs, *[(0, NO_ADAPTER)] * missing), mx.int32)
