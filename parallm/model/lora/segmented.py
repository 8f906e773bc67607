"""LoRA of rows that use any versions, by the CUDA kernels of `kernels/segmented_lora.py` (as SGMV; Punica).

`MergedLinear` applies it, for all targets of one input at once. All LoRA weights of a version are packed into few
arrays, and a kernel knows where in an array its own begin. As arrays of their own the weights of eight versions of an
8B shape are 2,816, each of which costs the host a microsecond a step; a single array would count in full for each
kernel that is handed over, and MLX launches what it has collected once that is much. Several versions are stacked, so
that a kernel has one input for all of them.

Axes: B rows, V versions, N numbers of a version in an array, I input, O output, R rank, K ranks of a group's targets
side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, islice

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.cuda import MIN_ON_DEVICE, VECTOR_BYTES, interned_array
from parallm.model.kernels.pack_matrices import MAX_MATRICES, Matrix, pack_matrices
from parallm.model.kernels.segmented_lora import COLUMNS, GroupWeights, PackedGroup, Targets
from parallm.model.lora.experts import ExpertLora, ExpertStructure, Routing, stack_experts
from parallm.model.lora.single import LoraScaling, expert_part, matrix_ranks

NO_ADAPTER = -1  # as the version of a row
MIN_LONG = 256
"""Tokens of prompts from which on LoRA is computed by MLX's products."""
MAX_NUMBERS = 1 << 21  # of a version in an array; one group's weights are never split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """The layout of all groups. Versions that are alike share one, so comparing layouts costs nothing."""

    groups: Mapping[Targets, PackedGroup]
    num_arrays: int
    experts: ExpertStructure = ExpertStructure()
    """The layout of one version's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLora:
    """The weights of some versions in few arrays (V, N); those of experts by themselves."""

    layout: PackedLayout
    arrays: tuple[mx.array, ...]
    experts: ExpertLora = field(default_factory=ExpertLora)

    @property
    def num_versions(self) -> int:
        return self.arrays[0].shape[0]

    def version(self, index: int) -> "PackedLora":
        """One of the versions, not evaluated."""
        arrays = tuple(array[index : index + 1] for array in self.arrays)
        return PackedLora(layout=self.layout, arrays=arrays, experts=self.experts.version(index))


def pack_lora(
    arrays: Mapping[str, mx.array], scaling: LoraScaling, groups: Sequence[Targets], dtype: mx.Dtype
) -> PackedLora | None:
    """An adapter's arrays as one version, evaluated. B has the scale; ranks become multiples of `COLUMNS`.

    None where the kernels cannot serve it: DoRA, another type than the base's, a part of a group's targets, a target in
    no group, sizes that are no whole vectors.
    """
    own_ranks = matrix_ranks(arrays)
    known = {target for targets in groups for target in targets}
    if scaling.norms_O or scaling.dtype != dtype or not known >= own_ranks.keys():
        return None
    ranks = {target: rank + -rank % COLUMNS for target, rank in own_ranks.items()}
    layouts: list[PackedGroup] = []
    parts: list[list[Matrix]] = [[]]  # of each array
    filled = 0  # numbers of the last one
    for targets in groups:
        present = [target in ranks for target in targets]
        if not any(present):
            continue
        if not all(present):
            return None
        a = [_matrix(arrays, target, ranks[target], scaling, is_a=True) for target in targets]
        b = [_matrix(arrays, target, ranks[target], scaling, is_a=False) for target in targets]
        if any(matrix.width % (VECTOR_BYTES // dtype.size) for matrix in (*a, *b)):
            return None
        sizes = sum(matrix.size for matrix in a), *(matrix.size for matrix in b)
        fits = len(parts[-1]) + len(a) + len(b) <= MAX_MATRICES and filled + sum(sizes) <= MAX_NUMBERS
        if parts[-1] and not fits:
            parts.append([])
            filled = 0
        layouts.append(
            PackedGroup(
                targets=targets,
                ranks=tuple(ranks[target] for target in targets),
                widths=tuple(matrix.width for matrix in b),
                array=len(parts) - 1,
                starts=tuple(islice(accumulate(sizes, initial=filled), len(sizes))),
            )
        )
        parts[-1] += [*a, *b]
        filled += sum(sizes)
    if not layouts:
        return None
    packed, experts = tuple(pack_matrices(part, dtype)[None] for part in parts), expert_part(arrays, scaling)
    mx.eval(packed, experts.arrays())
    layout = _layout(tuple(layouts), experts.structure())
    return PackedLora(layout=layout, arrays=packed, experts=experts)


def stack_packed(versions: Sequence[PackedLora]) -> PackedLora:
    """All versions in this order; they have one layout. Evaluated."""
    arrays = tuple(mx.concatenate(parts) for parts in zip(*(version.arrays for version in versions), strict=True))
    experts = stack_experts([version.experts for version in versions])
    mx.eval(arrays, experts.arrays())
    return PackedLora(layout=versions[0].layout, arrays=arrays, experts=experts)


def _matrix(arrays: Mapping[str, mx.array], target: str, rank: int, scaling: LoraScaling, *, is_a: bool) -> Matrix:
    factor = 1 / scaling.shift if is_a else scaling.scales[target] * scaling.shift
    array = arrays[f"{target}.lora_{'a' if is_a else 'b'}"]
    return Matrix(array=array, is_transposed=is_a, rank=rank, factor=factor)


@cache
def _layout(groups: tuple[PackedGroup, ...], experts: ExpertStructure) -> PackedLayout:
    by_targets = {group.targets: group for group in groups}
    return PackedLayout(groups=by_targets, num_arrays=groups[-1].array + 1, experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedStructure:
    """Equal for bindings for which the same operations are computed, but for the shapes of arrays."""

    layout: PackedLayout
    is_flat: bool
    has_index: bool
    num_versions: int

    def lora(self, arrays: Sequence[mx.array]) -> "SegmentedLora":
        """The binding with other arrays, in the order of `SegmentedLora.arrays`."""
        remaining = iter(arrays)
        order_B2 = next(remaining)
        index_B = next(remaining) if self.has_index else None
        weights = tuple(islice(remaining, self.layout.num_arrays))
        experts = self.layout.experts.lora([*remaining], self.num_versions)
        packed = PackedLora(layout=self.layout, arrays=weights, experts=experts)
        return SegmentedLora(weights=packed, order_B2=order_B2, index_B=index_B, is_flat=self.is_flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedLora:
    """Rows use different versions of `weights`."""

    weights: PackedLora
    order_B2: mx.array
    """See `order_rows`, or `order_tokens` where `is_flat`."""
    index_B: mx.array | None = None
    """The version of each row, -1 for none, where experts have to choose; else all rows use the first."""
    is_flat: bool = False
    """Whether rows are tokens of prompts."""

    def of_group(self, targets: Targets) -> GroupWeights | None:
        """The weights of a group; None if it has none."""
        layout = self.weights.layout.groups.get(targets)
        return None if layout is None else GroupWeights(layout=layout, array_VN=self.weights.arrays[layout.array])

    def of_several(self) -> Iterator[GroupWeights]:
        """The weights of groups of several targets, one for each number of ranks and inputs."""
        found = {}
        for targets in self.weights.layout.groups:
            if len(targets) > 1 and (weights := self.of_group(targets)):
                found[sum(weights.layout.ranks), weights.num_inputs] = weights
        yield from found.values()

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order of `SegmentedStructure.lora`."""
        return [*self.rows(), *self.weights.arrays, *self.weights.experts.arrays()]

    def rows(self) -> list[mx.array]:
        """The arrays that say which versions rows use: `order_B2`, and `index_B` if there is one."""
        return [self.order_B2] if self.index_B is None else [self.order_B2, self.index_B]

    def of_rows(self, rows: Sequence[mx.array]) -> "SegmentedLora":
        """The same weights for rows that use other versions; `rows` is as `rows()`."""
        order_B2, *index = rows
        return replace(self, order_B2=order_B2, index_B=index[0] if index else None)

    def structure(self) -> SegmentedStructure:
        return SegmentedStructure(
            layout=self.weights.layout,
            is_flat=self.is_flat,
            has_index=self.index_B is not None,
            num_versions=self.weights.num_versions if self.weights.experts else 1,
        )

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        """`y`: groups apply LoRA to their targets, and `pack_lora` refuses an adapter of other targets."""
        return y

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        return self.weights.experts.apply(target, x, y, routing, self.index_B)

    def dora_scale(self, target: str) -> None:
        return None


def add_products(weights: GroupWeights, y_BTO: mx.array, x_BTI: mx.array, versions_M: mx.array) -> mx.array:
    """A group's outputs `y_BTO` side by side, plus the products of `x_BTI` with A and B of the tokens' versions: by
    products for many tokens, which have tensor cores for it; `shrink` and `expand` have not.

    `versions_M` (-1: none) are not read where there is one version. Of several, each token is multiplied by all A, and
    only its own products go on: with eight of rank 16 that is a tenth of the base's work.
    """
    x_MI, a_VKI = x_BTI.flatten(0, -2), weights.joined_a()
    versions, columns, _ = a_VKI.shape
    hidden_MC = x_MI @ a_VKI.flatten(0, 1).T
    if versions > 1:
        is_own_MV1 = (versions_M[:, None] == mx.arange(versions, dtype=mx.int32))[:, :, None]
        hidden_MVK = hidden_MC.reshape(-1, versions, columns)
        hidden_MC = mx.where(is_own_MV1, hidden_MVK, mx.array(0, hidden_MC.dtype)).flatten(1, 2)
    return mx.addmm(y_BTO.flatten(0, -2), hidden_MC, weights.joined_b().flatten(0, 1)).reshape(y_BTO.shape)


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


def order_tokens(index_M: npt.NDArray[np.int32], num_versions: int) -> mx.array:
    """The same for tokens of prompts; in their own order, too, where products of all tokens read it."""
    is_sorted = num_versions > 1 and index_M.size < MIN_LONG
    order_M = np.argsort(index_M, kind="stable") if is_sorted else np.arange(index_M.size)
    return mx.array(np.stack([order_M, index_M[order_M]], axis=1).astype(np.int32))
