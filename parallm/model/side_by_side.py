"""The view of a few adapters at once: one product with all their A, of which each row keeps its own adapter's part.

While versions change, rows of two or three of them decode together. `MixedAdapters` starts a product for each row,
which on a CPU costs as much as the base's own products; this costs one plain product, whose other columns are dropped.

Axes: B rows, T tokens, I input, O output, K ranks of all adapters side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from parallm.model.lora import JoinedSites, OneAdapter, join_sites

MOST_ADAPTERS = 4
"""With more of them the columns that are dropped cost more than products of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Adapters next to each other, for any choice of rows."""

    factors: OneAdapter
    """A side by side and B on top of each other; its stretches are not used."""
    layouts: Sequence[mx.array]
    """Which adapter each of K columns belongs to, int32 (K,): one array for all products of the same ranks."""
    layout: Mapping[str, int]
    """Place in `layouts` of the product that serves a site."""
    stretch_SO: Mapping[str, mx.array]
    """As in `MixedAdapters`; the last entry is of rows without an adapter."""

    def for_rows(self, index_B: Sequence[int]) -> "RowsSideBySide":
        """Row b uses adapter `index_B[b]`, or none where that is -1."""
        index_B1 = mx.array(index_B, mx.int32)[:, None]
        return RowsSideBySide(
            adapters=self, index_B1=index_B1, is_own_B1K=[(index_B1 == owners_K)[:, None] for owners_K in self.layouts]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSideBySide:
    """View of one forward's rows."""

    adapters: SideBySide
    index_B1: mx.array
    is_own_B1K: Sequence[mx.array]
    """For each layout, whether a column is of the row's adapter."""

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        factors = self.adapters.factors
        if site not in factors.a_IR:
            return y
        is_own_B1K = self.is_own_B1K[self.adapters.layout[site]]
        # not times 0: what another adapter makes of a row may be infinite
        if site in factors.joined:
            own_BTK = factors.joined[site].product(site, x, is_own_B1K)
        else:
            own_BTK = mx.where(is_own_B1K, x @ factors.a_IR[site], 0)
        return y + (own_BTK @ factors.b_RO[site]).astype(y.dtype)

    def stretch(self, site: str) -> mx.array | None:
        stretches = self.adapters.stretch_SO
        return stretches[site][self.index_B1] if site in stretches else None


def side_by_side(adapters: Sequence[OneAdapter], sites: Iterable[str]) -> SideBySide:
    """Put adapters next to each other; one without a site has no columns there. Evaluated."""
    a_IK: dict[str, mx.array] = {}
    b_KO: dict[str, mx.array] = {}
    owners: dict[str, tuple[int, ...]] = {}
    for site in sites:
        having = [(place, one) for place, one in enumerate(adapters) if site in one.a_IR]
        if having:
            a_IK[site] = mx.concatenate([one.a_IR[site] for _, one in having], axis=1)
            b_KO[site] = mx.concatenate([one.b_RO[site] for _, one in having], axis=0)
            owners[site] = tuple(place for place, one in having for _ in range(one.a_IR[site].shape[1]))
    joined = {site: group for group in _joined(adapters, a_IK) for site in group.sites}
    owners |= {site: tuple(chain(*(owners[one] for one in group.sites))) for site, group in joined.items()}
    layouts = list(dict.fromkeys(owners.values()))
    found = SideBySide(
        factors=OneAdapter(a_IK, b_KO, {}, joined),
        layouts=[mx.array(owners_K, mx.int32) for owners_K in layouts],
        layout={site: layouts.index(owners_K) for site, owners_K in owners.items()},
        stretch_SO=_stretches(adapters),
    )
    mx.eval(a_IK, b_KO, found.layouts, found.stretch_SO)
    return found


def _joined(adapters: Sequence[OneAdapter], a_IK: Mapping[str, mx.array]) -> list[JoinedSites]:
    """The adapters' groups of sites with one input, over all their columns."""
    groups = dict.fromkeys(group.sites for one in adapters for group in one.joined.values())
    taken: set[str] = set()
    found = []
    for sites in sorted(groups, key=len, reverse=True):  # an adapter of fewer sites knows parts of another's groups
        if not taken & set(sites):
            taken |= set(sites)
            found.append(join_sites({site: a_IK[site] for site in sites}))
    return found


def _stretches(adapters: Sequence[OneAdapter]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for site in sorted({site for one in adapters for site in one.stretch_O}):
        none = next(mx.zeros_like(one.stretch_O[site]) for one in adapters if site in one.stretch_O)
        found[site] = mx.stack([*(one.stretch_O.get(site, none) for one in adapters), none])
    return found
