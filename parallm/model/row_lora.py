"""LoRA of rows that may use different adapters, as two CUDA kernels for all sites that get the same input.

Matrix products of rank 16 cost the host more than the device: each takes 8 microseconds to be handed over, and a layer
has eleven of them. These kernels take 2 and serve a group of sites at once: `shrink` multiplies a group's input by
all its A, `expand` splits the base's joined output into the sites' own and adds what the rows' B make of it. They are
named as in vLLM, after Punica (https://arxiv.org/abs/2310.18547).

The factors of a version lie in few arrays, of which a kernel knows where its own begin. As arrays of their own those of
eight versions of an 8B shape are 2,816, each of which costs the host a microsecond a step; as one for each version they
count in full for each kernel that is handed over, and MLX launches what it has collected once that is much (one H200,
2026-11-21). Versions are not stacked, so one that comes or goes costs nothing. Rows are sorted by version.

Axes: B rows, T tokens, I input, O output, R rank, K ranks of a group's sites side by side, N numbers of some groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

import mlx.core as mx

from parallm.model.cuda import LEAST_ON_DEVICE, PACK, VECTOR_BYTES, kernel
from parallm.model.lora import OneAdapter
from parallm.model.row_lora_source import COLUMNS, EXPAND_THREADS, MOST_WARPS, expand_source, shrink_source

MOST_VERSIONS = 8  # each is an input of the kernels
MOST_NUMBERS = 1 << 21  # of an array, but one group's are never cut
MOST_PARTS = 16  # of a sum: a thread of `expand` fetches them together
LEAST_CHUNK = 256  # of the input that a block of `shrink` takes: a vector for each lane of a warp
NO_ADAPTER = -1  # as the version of a row

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
    """All factors of a version in few arrays (N,)."""

    layout: Layout
    arrays: tuple[mx.array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFactors:
    """Of one group, for each version."""

    layout: GroupLayout
    starts: mx.array
    """`layout.starts`, int32, filled up to what MLX keeps on the device."""
    versions: tuple[mx.array, ...]
    """The array (N,) of each that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStructure:
    """What `RowAdapters` have in common for which the same operations are computed."""

    layout: Layout
    num_versions: int

    def view(self, arrays: Sequence[mx.array]) -> "RowAdapters":
        """The view with other arrays, which `RowAdapters.arrays` gave."""
        order_B2, *rest = arrays
        left = iter(rest)
        versions = tuple(tuple(islice(left, self.layout.num_arrays)) for _ in range(self.num_versions))
        return RowAdapters(layout=self.layout, versions=versions, order_B2=order_B2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdapters:
    """View of rows that use different versions of the factors. Applied by groups of sites, see `SiteGroup`."""

    layout: Layout
    versions: tuple[tuple[mx.array, ...], ...]
    """`FlatFactors.arrays` of each."""
    order_B2: mx.array
    """See `order_rows`."""

    def factors(self, sites: Sites) -> GroupFactors | None:
        """Those of a group; None: there are none."""
        layout = self.layout.groups.get(sites)
        if layout is None:
            return None
        versions = tuple(arrays[layout.array] for arrays in self.versions)
        return GroupFactors(layout=layout, starts=_starts(layout.starts), versions=versions)

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order in which `RowStructure.view` takes them."""
        return [self.order_B2, *(array for arrays in self.versions for array in arrays)]

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
    arrays = tuple(mx.concatenate([array.flatten() for array in some]) for some in parts)
    mx.eval(arrays)
    return FlatFactors(layout=_layout(tuple(found)), arrays=arrays)


def order_rows(index_B: Sequence[int], num_versions: int) -> mx.array:
    """Each row, which uses version `index_B[b]` or none where that is -1, and that number, int32 (B, 2).

    Rows of a version stand beside each other, so that blocks of the kernels read factors for several rows at once. What
    is behind the rows only keeps the array on the device.
    """
    pairs = list(enumerate(index_B))
    if num_versions > 1:
        pairs.sort(key=lambda pair: pair[1])
    missing = -(-LEAST_ON_DEVICE // 2) - len(pairs)
    return mx.array(pairs + [(0, NO_ADAPTER)] * missing, mx.int32)


class Products:
    """What the base's joined product of a group's sites and its rows' adapters come to."""

    def __init__(
        self,
        y_BTO: mx.array,
        x_BTI: mx.array,
        widths: Sequence[int],
        factors: GroupFactors | None,
        order_B2: mx.array | None,
    ) -> None:
        self._y_BTO, self._widths = y_BTO, tuple(widths)
        self._tile = 4 if y_BTO.shape[0] * y_BTO.shape[1] <= 64 else 8
        self._added = {} if factors is None or order_B2 is None else _shrunk(x_BTI, factors, order_B2, self._tile)
        self._ranks = factors.layout.ranks if factors else ()
        self._num_versions = len(factors.versions) if factors else 0

    def apart(self) -> list[mx.array]:
        """The outputs of each site, (B, T, O)."""
        threads = sum(self._widths) * self._y_BTO.dtype.size // VECTOR_BYTES
        return self._expanded([f"out{site}" for site in range(len(self._widths))], self._widths, threads)

    def gated(self) -> mx.array:
        """SwiGLU of two sites of the same width (B, T, O): silu of the first by the second."""
        threads = 2 * -(-self._widths[0] * self._y_BTO.dtype.size // VECTOR_BYTES // 32) * 32  # a warp for each
        return self._expanded(["product"], self._widths[:1], threads)[0]

    def _expanded(self, names: Sequence[str], widths: Sequence[int], threads: int) -> list[mx.array]:
        y, inputs, is_gated = self._y_BTO, {"y": self._y_BTO} | self._added, len(names) < len(self._widths)
        key = "_".join(str(number) for number in (*self._widths, *self._ranks, self._num_versions))
        source = expand_source(self._widths, self._ranks, self._num_versions, gated=is_gated)
        expand = kernel(f"lora_{names[0]}_{key}", tuple(inputs), tuple(names), source, PACK)
        return expand(
            inputs=list(inputs.values()),
            template=[("T", y.dtype), ("TILE", self._tile), ("K", sum(self._ranks))],
            grid=(
                -(-threads // EXPAND_THREADS) * EXPAND_THREADS,
                -(-(y.shape[0] * y.shape[1]) // self._tile),
                1,
            ),
            threadgroup=(EXPAND_THREADS, 1, 1),
            output_shapes=[(*y.shape[:2], width) for width in widths],
            output_dtypes=[y.dtype] * len(names),
        )


def _shrunk(x_BTI: mx.array, factors: GroupFactors, order_B2: mx.array, tile: int) -> dict[str, mx.array]:
    """What `expand` reads: the input's products with A, in parts that are still to be added up, and the factors."""
    rows, inputs = x_BTI.shape[0] * x_BTI.shape[1], x_BTI.shape[2]
    columns, chunk = sum(factors.layout.ranks), LEAST_CHUNK
    while -(-inputs // chunk) > MOST_PARTS:
        chunk *= 2
    threads, num_parts = 32 * min(columns // COLUMNS, MOST_WARPS), -(-inputs // chunk)
    given = {"order": order_B2, "starts": factors.starts}
    given |= {f"version{place}": array for place, array in enumerate(factors.versions)}
    count = len(factors.versions)
    shrink = kernel(f"lora_shrink_{count}", ("x", *given), ("parts",), shrink_source(count), PACK)
    (parts,) = shrink(
        inputs=[x_BTI, *given.values()],
        template=[("T", x_BTI.dtype), ("TILE", tile), ("K", columns), ("CHUNK", chunk)],
        grid=(-(-rows // tile) * threads, num_parts, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(num_parts, rows, columns)],
        output_dtypes=[mx.float32],
    )
    return {"parts": parts} | given


def _joined_a(adapter: OneAdapter, sites: Sites) -> mx.array:
    return adapter.joined[sites[0]].a_IK if sites[0] in adapter.joined else adapter.a_IR[sites[0]]


@cache
def _layout(groups: tuple[GroupLayout, ...]) -> Layout:
    return Layout(groups={group.sites: group for group in groups}, num_arrays=groups[-1].array + 1)


@cache
def _starts(starts: tuple[int, ...]) -> mx.array:
    """The same array for every trace, so that the device fetches it once."""
    return mx.array(starts + (0,) * (LEAST_ON_DEVICE - len(starts)), mx.int32)


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
