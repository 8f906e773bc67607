"""LoRA of rows that may use different adapters, as two CUDA kernels for all sites that get the same input.

Matrix products of rank 16 cost the host more than the device: each takes 8 microseconds to be handed over, and a layer
has eleven of them. These kernels take 2 and serve a group of sites at once: `shrink` multiplies a group's input by
all its A, `expand` splits the base's joined output into the sites' own and adds what the rows' B make of it. They are
named as in vLLM, after Punica (https://arxiv.org/abs/2310.18547). Nothing is stacked: kernels get the arrays of each
version, and the rows sorted by version.

Axes: B rows, T tokens, I input, O output, R rank, K ranks of a group's sites side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.cuda import PACK, VECTOR_BYTES, kernel
from parallm.model.lora import OneAdapter
from parallm.model.row_lora_source import EXPAND_THREADS, SHRINK_THREADS, expand_source, shrink_source

MOST_VERSIONS = 8  # each is an input of the kernels
CHUNKS = (256, 128, 64)  # of the input that a block takes, at most 256 by its shared memory
RANK_STEP = 8  # rows of B that are read together
WANTED_BLOCKS = 100  # of the grid: most of an H200's processors have one
NO_ADAPTER = -1

Sites = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFactors:
    """Of sites with one input, for each version."""

    a_IK: tuple[mx.array, ...]
    b_RO: tuple[tuple[mx.array, ...], ...]
    """By site, then by version; the scale is multiplied in."""

    def arrays(self) -> Iterator[mx.array]:
        yield from self.a_IK
        for versions in self.b_RO:
            yield from versions

    @property
    def ranks(self) -> list[int]:
        return [versions[0].shape[0] for versions in self.b_RO]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStructure:
    """What `RowAdapters` have in common for which the same operations are computed."""

    groups: tuple[Sites, ...]
    num_versions: int

    def view(self, arrays: Sequence[mx.array]) -> "RowAdapters":
        """The view with other arrays, which `RowAdapters.arrays` gave."""
        rest = iter(arrays)
        order_B2 = next(rest)
        factors: dict[Sites, GroupFactors] = {}
        for sites in self.groups:
            a_IK, *b_RO = [tuple(next(rest) for _ in range(self.num_versions)) for _ in (None, *sites)]
            factors[sites] = GroupFactors(a_IK=a_IK, b_RO=tuple(b_RO))
        return RowAdapters(factors=factors, order_B2=order_B2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdapters:
    """View of rows that use different versions of the factors. Applied by groups of sites, see `SiteGroup`."""

    factors: Mapping[Sites, GroupFactors]
    order_B2: mx.array
    """See `order_rows`."""

    def arrays(self) -> list[mx.array]:
        """All arrays, in the order in which `RowStructure.view` takes them."""
        return [self.order_B2, *(array for group in self.factors.values() for array in group.arrays())]

    def structure(self) -> RowStructure:
        versions = next((len(group.a_IK) for group in self.factors.values()), 0)
        return RowStructure(groups=tuple(self.factors), num_versions=versions)

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        raise NotImplementedError(f"{site} belongs to a group")

    def stretch(self, site: str) -> None:
        return None


def group_factors(
    adapters: Sequence[OneAdapter], groups: Sequence[Sites], dtype: mx.Dtype
) -> dict[Sites, GroupFactors] | None:
    """The factors of adapters that the kernels can serve together, or None: without DoRA, of the type of the base, with
    the same ranks at the same sites, and either all sites of a group or none."""
    first = adapters[0]
    shapes = [{site: one.b_RO[site].shape for site in one.b_RO} for one in adapters]
    if any(one.stretch_O for one in adapters) or any(other != shapes[0] for other in shapes):
        return None
    factors: dict[Sites, GroupFactors] = {}
    for sites in groups:
        present = [site in first.a_IR for site in sites]
        if not any(present):
            continue
        if not all(present):
            return None
        b_RO = tuple(tuple(one.b_RO[site] for one in adapters) for site in sites)
        found = GroupFactors(a_IK=tuple(_joined_a(one, sites) for one in adapters), b_RO=b_RO)
        if not _fits(found, dtype):
            return None
        factors[sites] = found
    return factors


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
    num_versions, ranks = (0, []) if factors is None else (len(factors.a_IK), factors.ranks)
    names = {
        f"b{site}_{version}": array
        for site, versions in enumerate(factors.b_RO if factors else ())
        for version, array in enumerate(versions)
    }
    inputs = {"y": y_BTO} | added | names
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
    """What `expand` reads of the input: its products with A, in parts that are still to be added up."""
    rows, inputs = x_BTI.shape[0] * x_BTI.shape[1], x_BTI.shape[2]
    tiles, columns = -(-rows // tile), factors.a_IK[0].shape[1]
    chunk = next((size for size in CHUNKS if tiles * -(-inputs // size) >= WANTED_BLOCKS), CHUNKS[-1])
    num_parts = -(-inputs // chunk)
    names = [f"a{version}" for version in range(len(factors.a_IK))]
    shrink = kernel(f"lora_shrink_{len(names)}", ("x", "order", *names), ("parts",), shrink_source(len(names)), PACK)
    (parts,) = shrink(
        inputs=[x_BTI, order_B2, *factors.a_IK],
        template=[("T", x_BTI.dtype), ("TILE", tile), ("K", columns), ("CHUNK", chunk)],
        grid=(tiles * SHRINK_THREADS, num_parts, 1),
        threadgroup=(SHRINK_THREADS, 1, 1),
        output_shapes=[(num_parts, rows, columns)],
        output_dtypes=[mx.float32],
    )
    return {"parts": parts, "order": order_B2}


def _joined_a(adapter: OneAdapter, sites: Sites) -> mx.array:
    return adapter.joined[sites[0]].a_IK if sites[0] in adapter.joined else adapter.a_IR[sites[0]]


def _fits(factors: GroupFactors, dtype: mx.Dtype) -> bool:
    """Whether threads can read whole vectors, and one block all columns."""
    values = VECTOR_BYTES // dtype.size
    inputs, columns = factors.a_IK[0].shape
    widths = [versions[0].shape[1] for versions in factors.b_RO]
    return (
        all(array.dtype == dtype for array in factors.arrays())
        and columns == sum(factors.ranks)
        and columns <= SHRINK_THREADS * values
        and not any(rank % RANK_STEP for rank in factors.ranks)
        and not any(size % values for size in (inputs, *widths))
    )
