"""All factors of a version in few arrays, as the kernels of `row_lora` read them.

A kernel knows where in an array its own factors begin. As arrays of their own those of eight versions of an 8B shape
are 2,816, each of which costs the host a microsecond a step; as a single one they would count in full for each kernel
that is handed over, and MLX launches what it has collected once that is much (one H200, 2026-11-21). Several versions
are stacked, so that a kernel has one input for all of them.

Axes: V versions, N numbers of one in an array, I input, O output, R rank, K ranks of a group's sites side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES
from parallm.model.kernels.segmented_lora import COLUMNS
from parallm.model.lora.single import SingleLora

MAX_NUMBERS = 1 << 21  # of a version in an array, but one group's are never cut

Targets = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """Sites with one input, and where their factors are among a version's."""

    targets: Targets
    ranks: tuple[int, ...]
    """Of each site."""
    widths: tuple[int, ...]
    """Outputs of each site."""
    array: int
    """Which of the version's arrays has them."""
    starts: tuple[int, ...]
    """Of A (K, I), all sites' below each other, and of each site's B (R, O), with the scale multiplied in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """Of all groups. Versions that are alike have the same one, so comparing them costs nothing."""

    groups: Mapping[Targets, PackedGroup]
    num_arrays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLora:
    """All factors of some versions in few arrays (V, N)."""

    layout: PackedLayout
    arrays: tuple[mx.array, ...]

    @property
    def num_versions(self) -> int:
        return self.arrays[0].shape[0]

    def version(self, place: int) -> "PackedLora":
        """One of them, not evaluated."""
        return PackedLora(layout=self.layout, arrays=tuple(array[place : place + 1] for array in self.arrays))


def pack_lora(adapter: SingleLora, groups: Sequence[Targets], dtype: mx.Dtype) -> PackedLora | None:
    """An adapter's factors, one version, or None where the kernels cannot serve it: DoRA, another type than the base's,
    some sites of a group only, a site in no group, sizes that are no whole vectors. Evaluated."""
    if adapter.dora_scale_O or not {target for targets in groups for target in targets} >= adapter.a_IR.keys():
        return None
    found: list[PackedGroup] = []
    parts: list[list[mx.array]] = [[]]  # of each array
    for targets in groups:
        present = [target in adapter.a_IR for target in targets]
        if not any(present):
            continue
        b_RO = [adapter.b_RO[target] for target in targets if target in adapter.b_RO]
        weights = [_joined_a(adapter, targets).T, *b_RO]
        if not all(present) or not _fits(weights, dtype):
            return None
        if parts[-1] and sum(array.size for array in (*parts[-1], *weights)) > MAX_NUMBERS:
            parts.append([])
        ends = accumulate((array.size for array in weights), initial=sum(array.size for array in parts[-1]))
        layout = PackedGroup(
            targets=targets,
            ranks=tuple(array.shape[0] for array in b_RO),
            widths=tuple(array.shape[1] for array in b_RO),
            array=len(parts) - 1,
            starts=tuple(islice(ends, len(weights))),
        )
        found.append(layout)
        parts[-1] += weights
    if not found:
        return None
    arrays = tuple(mx.concatenate([array.flatten() for array in some])[None] for some in parts)
    mx.eval(arrays)
    return PackedLora(layout=_layout(tuple(found)), arrays=arrays)


def stack_packed(weights: Sequence[PackedLora]) -> PackedLora:
    """All their versions in this order; they have one layout. Evaluated."""
    arrays = tuple(mx.concatenate(some) for some in zip(*(one.arrays for one in weights), strict=True))
    mx.eval(arrays)
    return PackedLora(layout=weights[0].layout, arrays=arrays)


def _joined_a(adapter: SingleLora, targets: Targets) -> mx.array:
    return adapter.joined[targets[0]].a_IK if targets[0] in adapter.joined else adapter.a_IR[targets[0]]


@cache
def _layout(groups: tuple[PackedGroup, ...]) -> PackedLayout:
    return PackedLayout(groups={group.targets: group for group in groups}, num_arrays=groups[-1].array + 1)


def _fits(weights: Sequence[mx.array], dtype: mx.Dtype) -> bool:
    """Whether threads can read whole vectors of A (K, I) and each B (R, O), and warps have whole columns."""
    values = VECTOR_BYTES // dtype.size
    ranks = [array.shape[0] for array in weights[1:]]
    return (
        all(array.dtype == dtype for array in weights)
        and weights[0].shape[0] == sum(ranks)
        and not any(rank % COLUMNS for rank in ranks)
        and not any(array.shape[1] % values for array in weights)
    )
