"""The view of a few adapters at once: one product with all their A, of which each row keeps its own adapter's part.

While versions change, rows of two or three of them decode together. `GatheredLora` starts a product for each row,
which on a CPU costs as much as the base's own products; this costs one plain product, whose other columns are dropped.

Axes: B rows, T tokens, I input, O output, K ranks of all adapters side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from parallm.model.lora.single import JoinedA, SingleLora, join_a

MAX_CONCATENATED = 4
"""With more of them the columns that are dropped cost more than products of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatenatedLoras:
    """Adapters next to each other, for any choice of rows."""

    weights: SingleLora
    """A side by side and B on top of each other; its stretches are not used."""
    layouts: Sequence[mx.array]
    """Which adapter each of K columns belongs to, int32 (K,): one array for all products of the same ranks."""
    layout: Mapping[str, int]
    """Place in `layouts` of the product that serves a site."""
    dora_scale_SO: Mapping[str, mx.array]
    """As in `GatheredLora`; the last entry is of rows without an adapter."""

    def select(self, index_B: Sequence[int]) -> "ConcatenatedLora":
        """Row b uses adapter `index_B[b]`, or none where that is -1."""
        index_B1 = mx.array(index_B, mx.int32)[:, None]
        return ConcatenatedLora(
            adapters=self, index_B1=index_B1, is_own_B1K=[(index_B1 == owners_K)[:, None] for owners_K in self.layouts]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatenatedLora:
    """View of one forward's rows."""

    adapters: ConcatenatedLoras
    index_B1: mx.array
    is_own_B1K: Sequence[mx.array]
    """For each layout, whether a column is of the row's adapter."""

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        weights = self.adapters.weights
        if target not in weights.a_IR:
            return y
        is_own_B1K = self.is_own_B1K[self.adapters.layout[target]]
        # not times 0: what another adapter makes of a row may be infinite
        if target in weights.joined:
            own_BTK = weights.joined[target].product(target, x, is_own_B1K)
        else:
            own_BTK = mx.where(is_own_B1K, x @ weights.a_IR[target], 0)
        return y + (own_BTK @ weights.b_RO[target]).astype(y.dtype)

    def dora_scale(self, target: str) -> mx.array | None:
        stretches = self.adapters.dora_scale_SO
        return stretches[target][self.index_B1] if target in stretches else None


def concatenate_loras(adapters: Sequence[SingleLora], targets: Iterable[str]) -> ConcatenatedLoras:
    """Put adapters next to each other; one without a site has no columns there. Evaluated."""
    a_IK: dict[str, mx.array] = {}
    b_KO: dict[str, mx.array] = {}
    owners: dict[str, tuple[int, ...]] = {}
    for target in targets:
        having = [(place, one) for place, one in enumerate(adapters) if target in one.a_IR]
        if having:
            a_IK[target] = mx.concatenate([one.a_IR[target] for _, one in having], axis=1)
            b_KO[target] = mx.concatenate([one.b_RO[target] for _, one in having], axis=0)
            owners[target] = tuple(place for place, one in having for _ in range(one.a_IR[target].shape[1]))
    joined = {target: group for group in _joined(adapters, a_IK) for target in group.targets}
    owners |= {target: tuple(chain(*(owners[one] for one in group.targets))) for target, group in joined.items()}
    layouts = list(dict.fromkeys(owners.values()))
    found = ConcatenatedLoras(
        weights=SingleLora(a_IK, b_KO, {}, joined),
        layouts=[mx.array(owners_K, mx.int32) for owners_K in layouts],
        layout={target: layouts.index(owners_K) for target, owners_K in owners.items()},
        dora_scale_SO=_stretches(adapters),
    )
    mx.eval(a_IK, b_KO, found.layouts, found.dora_scale_SO)
    return found


def _joined(adapters: Sequence[SingleLora], a_IK: Mapping[str, mx.array]) -> list[JoinedA]:
    """The adapters' groups of sites with one input, over all their columns."""
    groups = dict.fromkeys(group.targets for one in adapters for group in one.joined.values())
    taken: set[str] = set()
    found = []
    for targets in sorted(groups, key=len, reverse=True):  # an adapter of fewer sites knows parts of another's groups
        if not taken & set(targets):
            taken |= set(targets)
            found.append(join_a({target: a_IK[target] for target in targets}))
    return found


def _stretches(adapters: Sequence[SingleLora]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for target in sorted({target for one in adapters for target in one.dora_scale_O}):
        none = next(mx.zeros_like(one.dora_scale_O[target]) for one in adapters if target in one.dora_scale_O)
        found[target] = mx.stack([*(one.dora_scale_O.get(target, none) for one in adapters), none])
    return found
