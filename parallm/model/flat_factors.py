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

from parallm.model.cuda import VECTOR_BYTES
from parallm.model.lora import OneAdapter
from parallm.model.row_lora_source import COLUMNS

MOST_NUMBERS = 1 << 21  # of a version in an array, but one group's are never cut

Sites = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Sites with one input, and where their factors are among a version's."""

    sites: Sites
    ranks: tuple[int, ...]
    """Of each site."""
    widths: tuple[int, ...]
    """Outputs of each site."""
    array: int
    """Which of the version's arrays has them."""
    starts: tuple[int, ...]
    """Of A (K, I), all sites' below each other, and of each site's B (R, O), with the scale multiplied in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Of all groups. Versions that are alike have the same one, so comparing them costs nothing."""

    groups: Mapping[Sites, GroupLayout]
    num_arrays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFactors:
    """All factors of some versions in few arrays (V, N)."""

    layout: Layout
    arrays: tuple[mx.array, ...]

    @property
    def num_versions(self) -> int:
        return self.arrays[0].shape[0]

    def version(self, place: int) -> "FlatFactors":
        """One of them, not evaluated."""
        return FlatFactors(layout=self.layout, arrays=tuple(array[place : place + 1] for array in self.arrays))


def flat_factors(adapter: OneAdapter, groups: Sequence[Sites], dtype: mx.Dtype) -> FlatFactors | None:
    """An adapter's factors, one version, or None where the kernels cannot serve it: DoRA, another type than the base's,
    some sites of a group only, a site in no group, sizes that are no whole vectors. Evaluated."""
    if adapter.stretch_O or not {site for sites in groups for site in sites} >= adapter.a_IR.keys():
        return None
    found: list[GroupLayout] = []
    parts: list[list[mx.array]] = [[]]  # of each array
    for sites in groups:
        present = [site in adapter.a_IR for site in sites]
        if not any(present):
            continue
        b_RO = [adapter.b_RO[site] for site in sites if site in adapter.b_RO]
        factors = [_joined_a(adapter, sites).T, *b_RO]
        if not all(present) or not _fits(factors, dtype):
            return None
        if parts[-1] and sum(array.size for array in (*parts[-1], *factors)) > MOST_NUMBERS:
            parts.append([])
        ends = accumulate((array.size for array in factors), initial=sum(array.size for array in parts[-1]))
        layout = GroupLayout(
            sites=sites,
            ranks=tuple(array.shape[0] for array in b_RO),
            widths=tuple(array.shape[1] for array in b_RO),
            array=len(parts) - 1,
            starts=tuple(islice(ends, len(factors))),
        )
        found.append(layout)
        parts[-1] += factors
    if not found:
        return None
    arrays = tuple(mx.concatenate([array.flatten() for array in some])[None] for some in parts)
    mx.eval(arrays)
    return FlatFactors(layout=_layout(tuple(found)), arrays=arrays)


def stack_factors(factors: Sequence[FlatFactors]) -> FlatFactors:
    """All their versions in this order; they have one layout. Evaluated."""
    arrays = tuple(mx.concatenate(some) for some in zip(*(one.arrays for one in factors), strict=True))
    mx.eval(arrays)
    return FlatFactors(layout=factors[0].layout, arrays=arrays)


def _joined_a(adapter: OneAdapter, sites: Sites) -> mx.array:
    return adapter.joined[sites[0]].a_IK if sites[0] in adapter.joined else adapter.a_IR[sites[0]]


@cache
def _layout(groups: tuple[GroupLayout, ...]) -> Layout:
    return Layout(groups={group.sites: group for group in groups}, num_arrays=groups[-1].array + 1)


def _fits(factors: Sequence[mx.array], dtype: mx.Dtype) -> bool:
    """Whether threads can read whole vectors of A (K, I) and each B (R, O), and warps have whole columns."""
    values = VECTOR_BYTES // dtype.size
    ranks = [array.shape[0] for array in factors[1:]]
    return (
        all(array.dtype == dtype for array in factors)
        and factors[0].shape[0] == sum(ranks)
        and not any(rank % COLUMNS for rank in ranks)
        and not any(array.shape[1] % values for array in factors)
    )
