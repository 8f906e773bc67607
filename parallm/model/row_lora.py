"""LoRA of rows that may use different adapters, as two CUDA kernels for all sites that get the same input.

Matrix products of rank 16 cost the host more than the device: each takes 8 microseconds to be handed over, and a layer
has eleven of them. These kernels take 2 and serve a group of sites at once: `shrink` multiplies a group's input by
all its A, `expand` splits the base's joined output into the sites' own and adds what the rows' B make of it. They are
named as in vLLM, after Punica (https://arxiv.org/abs/2310.18547).

All factors of a version are one array, of which a kernel knows where its own begin. As arrays of their own those of
eight versions of an 8B shape are 2,816, each of which costs the host a microsecond a step (one H200, 2026-11-21).
Versions are not stacked, so one that comes or goes costs nothing. Rows are sorted by version.

Axes: B rows, T tokens, I input, O output, R rank, K ranks of a group's sites side by side, N numbers of all factors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import mlx.core as mx

from parallm.model.cuda import PACK, VECTOR_BYTES, kernel
from parallm.model.lora import OneAdapter
from parallm.model.row_lora_source import EXPAND_THREADS, SHRINK_THREADS, expand_source, shrink_source

MOST_VERSIONS = 8  # each is an input of the kernels
MOST_NUMBERS = 2**31 - 1  # of a version, as `starts` are int32
CHUNKS = (256, 128, 64)  # of the input that a block takes, at most 256 by its shared memory
RANK_STEP = 8  # rows of B that are read together
WANTED_BLOCKS = 100  # of the grid: most of an H200's processors have one
NO_ADAPTER = -1

Sites = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Sites with one input, and where their factors are among all of a version."""

    sites: Sites
    inputs: int
    ranks: tuple[int, ...]
    """Of each site."""
    widths: tuple[int, ...]
    """Outputs of each site."""
    starts: tuple[int, ...]
    """Of A (I, K), all sites' side by side, and of each site's B (R, O), with the scale multiplied in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Of all groups. Versions that are alike have the same one, so comparing them costs nothing."""

    groups: Mapping[Sites, GroupLayout]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFactors:
    """All factors of a version in one array."""

    layout: Layout
    factors_N: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFactors:
    """Of one group, for each version."""

    layout: GroupLayout
    starts: mx.array
    """`layout.starts`, int32."""
    versions: tuple[mx.array, ...]
    """The factors of all groups of each, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStructure:
    """What `RowAdapters` have in common for which the same operations are computed."""

    layout: Layout
    num_versions: int

    def view(self, arrays: Sequence[mx.array]) -> "RowAdapters":
        """The view with other arrays, which `RowAdapters.arrays` gave."""
        return RowAdapters(layout=self.layout, versions=tuple(arrays[1:]), order_B2=arrays[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdapters:
    """View of rows that use different versions of the factors. Applied by groups of sites, see `SiteGroup`."""

    layout: Layout
    versions: tuple[mx.array, ...]
    """`FlatFactors.factors_N` of each."""
    order_B2: mx.array
    """See `order_rows`."""

    def factors(self, sites: Sites) -> GroupFactors | None:
        """Those of a group; None: there are none."""
        layout = self.layout.groups.get(sites)
        if layout is None:
            return None
        return GroupFactors(layout=layout, starts=_starts(layout.starts), versions=self.versions)

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order in which `RowStructure.view` takes them."""
        return [self.order_B2, *self.versions]

    def structure(self) -> RowStructure:
        return RowStructure(layout=self.layout, num_versions=len(self.versions))

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        raise NotImplementedError(f"{site} belongs to a group")

    def stretch(self, site: str) -> None:
        return None


def flat_factors(adapter: OneAdapter, groups: Sequence[Sites], dtype: mx.Dtype) -> FlatFactors | None:
    """An adapter's factors for the kernels, or None where they cannot serve it: DoRA, another type than the base's,
    some sites of a group only, sizes that are no whole vectors. Evaluated."""
    if adapter.stretch_O:
        return None
    found: list[GroupLayout] = []
    parts: list[mx.array] = []
    num_numbers = 0
    for sites in groups:
        present = [site in adapter.a_IR for site in sites]
        if not any(present):
            continue
        arrays = [_joined_a(adapter, sites), *(adapter.b_RO[site] for site in sites if site in adapter.b_RO)]
        if not all(present) or not _fits(arrays, dtype):
            return None
        ends = list(accumulate((array.size for array in arrays), initial=num_numbers))
        found.append(
            GroupLayout(
                sites=sites,
                inputs=arrays[0].shape[0],
                ranks=tuple(array.shape[0] for array in arrays[1:]),
                widths=tuple(array.shape[1] for array in arrays[1:]),
                starts=tuple(ends[:-1]),
            )
        )
        parts += [array.flatten() for array in arrays]
        num_numbers = ends[-1]
    if not parts or num_numbers > MOST_NUMBERS:
        return None
    factors_N = mx.concatenate(parts)
    mx.eval(factors_N)
    return FlatFactors(layout=_layout(tuple(found)), factors_N=factors_N)


def order_rows(index_B: Sequence[int], num_versions: int) -> mx.array:
    """Each row, which uses version `index_B[b]` or none where that is -1, and that number, int32 (B, 2).

    Rows of a version stand beside each other, so that blocks of the kernels read factors for several rows at once.
    """
    pairs = list(enumerate(index_B))
    if num_versions > 1:
        pairs.sort(key=lambda pair: pair[1])
    return mx.array(pairs, mx.int32)


def outputs(
    y_BTO: mx.array, x_BTI: mx.array, widths: Sequence[int], factors: GroupFactors | None, order_B2: mx.array | None
) -> list[mx.array]:
    """The outputs of a group's sites, (B, T, O) each, out of the base's outputs beside each other."""
    rows = y_BTO.shape[0] * y_BTO.shape[1]
    tile = 4 if rows <= 64 else 8
    added = {} if factors is None or order_B2 is None else _shrunk(x_BTI, factors, order_B2, tile)
    num_versions, ranks = (0, ()) if factors is None else (len(factors.versions), factors.layout.ranks)
    inputs = {"y": y_BTO} | added
    vectors = sum(widths) * y_BTO.dtype.size // VECTOR_BYTES
    key = "_".join(str(number) for number in (*widths, *ranks, num_versions))
    expand = kernel(
        f"lora_expand_{key}",
        tuple(inputs),
        tuple(f"out{site}" for site in range(len(widths))),
        expand_source(widths, ranks, num_versions),
        PACK,
    )
    return expand(
        inputs=list(inputs.values()),
        template=[("T", y_BTO.dtype), ("TILE", tile), ("K", sum(ranks))],
        grid=(-(-vectors // EXPAND_THREADS) * EXPAND_THREADS, -(-rows // tile), 1),
        threadgroup=(EXPAND_THREADS, 1, 1),
        output_shapes=[(*y_BTO.shape[:2], width) for width in widths],
        output_dtypes=[y_BTO.dtype] * len(widths),
    )


def _shrunk(x_BTI: mx.array, factors: GroupFactors, order_B2: mx.array, tile: int) -> dict[str, mx.array]:
    """What `expand` reads: the input's products with A, in parts that are still to be added up, and the factors."""
    rows, inputs = x_BTI.shape[0] * x_BTI.shape[1], x_BTI.shape[2]
    tiles, columns = -(-rows // tile), sum(factors.layout.ranks)
    chunk = next((size for size in CHUNKS if tiles * -(-inputs // size) >= WANTED_BLOCKS), CHUNKS[-1])
    num_parts = -(-inputs // chunk)
    given = {"order": order_B2, "starts": factors.starts}
    given |= {f"version{place}": array for place, array in enumerate(factors.versions)}
    count = len(factors.versions)
    shrink = kernel(f"lora_shrink_{count}", ("x", *given), ("parts",), shrink_source(count), PACK)
    (parts,) = shrink(
        inputs=[x_BTI, *given.values()],
        template=[("T", x_BTI.dtype), ("TILE", tile), ("K", columns), ("CHUNK", chunk)],
        grid=(tiles * SHRINK_THREADS, num_parts, 1),
        threadgroup=(SHRINK_THREADS, 1, 1),
        output_shapes=[(num_parts, rows, columns)],
        output_dtypes=[mx.float32],
    )
    return {"parts": parts} | given


def _joined_a(adapter: OneAdapter, sites: Sites) -> mx.array:
    return adapter.joined[sites[0]].a_IK if sites[0] in adapter.joined else adapter.a_IR[sites[0]]


@cache
def _layout(groups: tuple[GroupLayout, ...]) -> Layout:
    return Layout(groups={group.sites: group for group in groups})


@cache
def _starts(starts: tuple[int, ...]) -> mx.array:
    """The same array for every trace, so that the device fetches it once."""
    return mx.array(starts, mx.int32)


def _fits(arrays: Sequence[mx.array], dtype: mx.Dtype) -> bool:
    """Whether threads can read whole vectors of A (I, K) and each B (R, O), and one block all columns."""
    values = VECTOR_BYTES // dtype.size
    (inputs, columns), ranks = arrays[0].shape, [array.shape[0] for array in arrays[1:]]
    return (
        all(array.dtype == dtype for array in arrays)
        and columns == sum(ranks)
        and columns <= SHRINK_THREADS * values
        and not any(rank % RANK_STEP for rank in ranks)
        and not any(size % values for size in (inputs, *(array.shape[1] for array in arrays[1:])))
    )
