"""LoRA of rows that use several adapters: one product with all their A, of which each row keeps its own adapter's part.

A product for each row (as BGMV) costs a CPU as much as the base's own products. One plain product, whose other columns
are dropped, costs less up to 16 adapters of rank 16, and not much more after that.

Axes: B rows, T tokens, I input, O output, K ranks of all adapters side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import mlx.core as mx

from parallm.model.lora.experts import Routing, stack_experts
from parallm.model.lora.joined import JoinedA, join_a
from parallm.model.lora.single import SingleLora

MAX_COLUMNS = 256
"""Columns of a product with B: MKL sums longer ones in parts, whose ends could lie within an adapter, so that a row got
other bits than alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatenatedLoras:
    """Adapters next to each other, for any choice of rows."""

    weights: SingleLora
    """A side by side and B on top of each other, experts one version after the other; its DoRA scales are not used."""
    owners: Sequence[mx.array]
    """Adapter of each of K columns, int32 (K,): one array for all products of the same ranks."""
    owner: Mapping[str, int]
    """Index in `owners` of the product that serves a target."""
    cuts: Mapping[str, Sequence[int]]
    """Columns between products with B, of targets with more than `MAX_COLUMNS`."""
    dora_scale_SO: Mapping[str, mx.array]
    """DoRA scales of S adapters; the last entry is for rows without an adapter."""

    def select(self, index_B: Sequence[int]) -> "ConcatenatedLora":
        """Row b uses adapter `index_B[b]`, or none where that is -1."""
        index_B1 = mx.array(index_B, mx.int32)[:, None]
        return ConcatenatedLora(
            adapters=self, index_B1=index_B1, is_own_B1K=[(index_B1 == owner_K)[:, None] for owner_K in self.owners]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatenatedLora:
    """The binding of one forward's rows."""

    adapters: ConcatenatedLoras
    index_B1: mx.array
    is_own_B1K: Sequence[mx.array]
    """For each of `owners`, whether a column belongs to the row's adapter."""

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        weights = self.adapters.weights
        if target not in weights.a_IR:
            return y
        is_own_B1K = self.is_own_B1K[self.adapters.owner[target]]
        if target in weights.joined:
            own_BTK = weights.joined[target].product(target, x, partial(_own_product, is_own_B1K))
        else:
            own_BTK = _own_product(is_own_B1K, x, weights.a_IR[target])
        if target in self.adapters.cuts:
            cuts = list(self.adapters.cuts[target])
            parts = zip(mx.split(own_BTK, cuts, axis=-1), mx.split(weights.b_RO[target], cuts), strict=True)
            first, *others = [own @ b_RO for own, b_RO in parts]
            return y + sum(others, first).astype(y.dtype)
        return y + (own_BTK @ weights.b_RO[target]).astype(y.dtype)

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        return self.adapters.weights.experts.apply(target, x, y, routing, self.index_B1[:, 0])

    def dora_scale(self, target: str) -> mx.array | None:
        scales = self.adapters.dora_scale_SO
        return scales[target][self.index_B1] if target in scales else None


def _own_product(is_own_B1K: mx.array, x_BTI: mx.array, a_IK: mx.array) -> mx.array:
    """The columns of each row's own adapter, zeros in others."""
    if x_BTI.ndim == 2:  # one token of each row, as Mamba-1 hands on
        is_own_B1K = is_own_B1K[:, 0]
    # not times 0: another adapter's product with a row may be infinite
    return mx.where(is_own_B1K, x_BTI @ a_IK, 0)


def concatenate_loras(adapters: Sequence[SingleLora], targets: Iterable[str]) -> ConcatenatedLoras:
    """Put adapters next to each other; one that lacks a target has no columns there. Evaluated."""
    a_IK: dict[str, mx.array] = {}
    b_KO: dict[str, mx.array] = {}
    owners: dict[str, tuple[int, ...]] = {}
    cuts: dict[str, list[int]] = {}
    for target in targets:
        present = {index: adapter for index, adapter in enumerate(adapters) if target in adapter.a_IR}
        if present:
            a_IK[target] = mx.concatenate([adapter.a_IR[target] for adapter in present.values()], axis=1)
            b_KO[target] = mx.concatenate([adapter.b_RO[target] for adapter in present.values()], axis=0)
            ranks = {index: adapter.a_IR[target].shape[1] for index, adapter in present.items()}
            owners[target] = tuple(chain.from_iterable([index] * rank for index, rank in ranks.items()))
            if len(owners[target]) > MAX_COLUMNS:
                cuts[target] = _cuts(ranks.values())
    joined = {target: group for group in _joined(adapters, a_IK) for target in group.targets}
    owners |= {target: tuple(chain(*(owners[other] for other in group.targets))) for target, group in joined.items()}
    distinct = list(dict.fromkeys(owners.values()))
    loras = ConcatenatedLoras(
        weights=SingleLora(a_IK, b_KO, {}, joined, stack_experts([adapter.experts for adapter in adapters])),
        owners=[mx.array(owner_K, mx.int32) for owner_K in distinct],
        owner={target: distinct.index(owner_K) for target, owner_K in owners.items()},
        cuts=cuts,
        dora_scale_SO=_dora_scales(adapters),
    )
    mx.eval(a_IK, b_KO, loras.weights.experts.arrays(), loras.owners, loras.dora_scale_SO)
    return loras


def _cuts(ranks: Iterable[int]) -> list[int]:
    """Ends of adapters, with at most `MAX_COLUMNS` between them where no single adapter has more."""
    cuts, end = [0], 0
    for rank in ranks:
        if end + rank - cuts[-1] > MAX_COLUMNS and end > cuts[-1]:
            cuts.append(end)
        end += rank
    return cuts[1:]


def _joined(adapters: Sequence[SingleLora], a_IK: Mapping[str, mx.array]) -> list[JoinedA]:
    """The adapters' groups of targets with one input, over all their columns."""
    groups = dict.fromkeys(group.targets for adapter in adapters for group in adapter.joined.values())
    taken: set[str] = set()
    joined = []
    for targets in sorted(groups, key=len, reverse=True):  # an adapter of fewer targets has parts of another's groups
        if not taken & set(targets):
            taken |= set(targets)
            joined.append(join_a({target: a_IK[target] for target in targets}))
    return joined


def _dora_scales(adapters: Sequence[SingleLora]) -> dict[str, mx.array]:
    scales: dict[str, mx.array] = {}
    for target in sorted({target for adapter in adapters for target in adapter.dora_scale_O}):
        own = [adapter.dora_scale_O.get(target) for adapter in adapters]
        none = next(mx.zeros_like(scale) for scale in own if scale is not None)
        scales[target] = mx.stack([none if scale is None else scale for scale in [*own, None]])
    return scales
