"""LoRA on the experts of a mixture: a pair of matrices for each expert, applied by gathered products.

mlx-lm multiplies each token with the weights of its chosen experts in one gathered product (`SwitchLinear`). LoRA does
the same with its own matrices: A of all experts is one array, B another. The versions that rows of one forward use lie
one after the other, and a row gathers the matrices of its version's expert. The router stays frozen.

Axes: B rows of a forward, N rows of a gathered product (one for each token and chosen expert), E experts of all
versions, I input, O output, R rank, K ranks of joined targets side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.model.kernels import grouped_gemm
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.joined import JoinedA, join_a, padded, present_groups
from parallm.model.patches.experts import ExpertProduct, SortedExperts, tiles_of
from parallm.model.patches.forward import origin_of

Targets = tuple[str, ...]
MAX_UNSORTED = 65_535
"""Rows of a product that are not sorted by their experts. MLX's CUDA build makes each a place on an axis of a grid that
ends there; sorted ones are groups, for which there is no such limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The expert of each row of a gathered product: indices (.., tokens, chosen), or (N,) in the order of experts."""

    experts: mx.array
    is_sorted: bool

    def product(self, x: mx.array, weights_EIO: mx.array) -> mx.array:
        """Rows `x` (.., 1, I) times the weights of their experts, (.., 1, O)."""
        if self.is_sorted and grouped_gemm.fits(x, weights_EIO):
            tiles_M4 = tiles_of(self.experts, weights_EIO.shape[0])
            rows_NI = x.reshape(-1, x.shape[-1])
            y_NO = grouped_gemm.grouped_factors(rows_NI, weights_EIO, self.experts, tiles_M4)
            return y_NO.reshape(*x.shape[:-1], -1)
        if self.is_sorted or self.experts.shape[0] <= MAX_UNSORTED:
            return mx.gather_mm(x, weights_EIO, rhs_indices=self.experts, sorted_indices=self.is_sorted)
        cuts = [*range(MAX_UNSORTED, self.experts.shape[0], MAX_UNSORTED)]
        parts = zip(mx.split(x, cuts), mx.split(self.experts, cuts), strict=True)
        return mx.concatenate([mx.gather_mm(rows, weights_EIO, rhs_indices=experts) for rows, experts in parts])

    def versions(self, index_B: mx.array) -> mx.array:
        """The version `index_B` of each row's sequence, of a shape that broadcasts with `experts`."""
        origin = origin_of(self.experts)
        if isinstance(origin, SortedExperts):
            return index_B[origin.tokens_N // (origin.num_tokens // index_B.size)]
        assert not self.is_sorted, "experts that something else than sort_by_expert has sorted"
        tokens = self.experts.shape[:-1]
        num_tokens = self.experts.size // self.experts.shape[-1]
        return mx.repeat(index_B, num_tokens // index_B.size).reshape(*tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStructure:
    """Names and shapes of the targets of `ExpertLora`, without arrays."""

    groups: tuple[tuple[Targets, tuple[int, ...] | None], ...] = ()
    """Targets and cuts of each joined A."""
    targets: Targets = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of each array of one version."""

    def lora(self, arrays: Sequence[mx.array], num_versions: int = 1) -> "ExpertLora":
        """The weights with other arrays, in the order of `ExpertLora.arrays`."""
        groups = [JoinedA(targets, cuts, a) for (targets, cuts), a in zip(self.groups, arrays, strict=False)]
        b_ERO = dict(zip(self.targets, arrays[len(groups) :], strict=True))
        return ExpertLora(_by_target(groups), b_ERO, num_versions)

    def target_of_each(self) -> list[str]:
        """A target that reads it, for each of `ExpertLora.arrays`."""
        return [*(targets[0] for targets, _ in self.groups), *self.targets]


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """The weights of experts' targets, of one version or of several; `b_ERO` contains the scale."""

    groups: Mapping[str, JoinedA] = field(default_factory=dict)
    """For each target the group whose A (E, I, K) holds its own."""
    b_ERO: Mapping[str, mx.array] = field(default_factory=dict)
    num_versions: int = 1

    def __bool__(self) -> bool:
        return bool(self.b_ERO)

    def apply(
        self, target: str, x: mx.array, y: mx.array, routing: Routing, index_B: mx.array | None = None
    ) -> mx.array:
        """The output `y` (.., 1, O) of `target` plus LoRA's product for its input `x` (.., 1, I).

        Row b of the forward uses version `index_B[b]`, or none where that is -1; without `index_B` all use the first.
        """
        if target not in self.b_ERO:
            return y
        b_ERO = self.b_ERO[target]
        if index_B is None:
            hidden = self.groups[target].product(target, x, routing.product)
            origin = origin_of(y)
            if isinstance(origin, ExpertProduct) and grouped_gemm.fits_plus(hidden, b_ERO):
                return origin.plus(hidden, b_ERO)
            return y + routing.product(hidden, b_ERO).astype(y.dtype)
        versions = routing.versions(index_B)
        own = routing
        if self.num_versions > 1:
            num_experts = b_ERO.shape[0] // self.num_versions
            own = Routing(experts=mx.maximum(versions, 0) * num_experts + routing.experts, is_sorted=False)
        hidden = self.groups[target].product(target, x, own.product)
        # not times 0: another version's product with a row may be infinite
        return mx.where((versions >= 0)[..., None, None], y + own.product(hidden, b_ERO).astype(y.dtype), y)

    def structure(self) -> ExpertStructure:
        """Equal for weights for which the same operations are computed."""
        groups = self._groups()
        return ExpertStructure(
            groups=tuple((group.targets, group.cuts) for group in groups),
            targets=tuple(self.b_ERO),
            shapes=tuple((array.shape[0] // self.num_versions, *array.shape[1:]) for array in self.arrays()),
        )

    def arrays(self) -> list[mx.array]:
        """All arrays that a forward reads, in the order of `ExpertStructure.lora`."""
        return [*(group.a_IK for group in self._groups()), *self.b_ERO.values()]

    def only(self, targets: Sequence[str]) -> "ExpertLora":
        """The part for these targets; a group lies inside or outside of them as a whole."""
        groups = [group for group in self._groups() if group.targets[0] in targets]
        b_ERO = {target: b for target, b in self.b_ERO.items() if target in targets}
        return ExpertLora(_by_target(groups), b_ERO, self.num_versions)

    def apart(self) -> "ExpertLora":
        """The same weights with a product of its own for each target."""
        a_EIR = {target: group.split(group.a_IK)[target] for target, group in self.groups.items()}
        return expert_lora(a_EIR, self.b_ERO, ())

    def widened(self) -> "ExpertLora":
        """The same weights; B of joined targets takes the columns of all, with zeros for those of others, as long as
        our kernel multiplies so many. Parts of a product need not be copied, and a rank of 16 takes no longer than 8.
        """
        b_ERO = dict(self.b_ERO)
        groups: list[JoinedA] = []
        for group in self._groups():
            rank = group.a_IK.shape[-1]
            if group.cuts and rank <= grouped_gemm.MAX_RANK:
                for target, start in zip(group.targets, (0, *group.cuts), strict=True):
                    b_ERO[target] = padded(b_ERO[target], -2, start, rank)
                group = JoinedA(group.targets, None, group.a_IK)
            groups.append(group)
        return ExpertLora(_by_target(groups), b_ERO, self.num_versions)

    def version(self, index: int) -> "ExpertLora":
        """One of the versions, not evaluated."""
        size = {name: b.shape[0] // self.num_versions for name, b in self.b_ERO.items()}
        part = {name: slice(index * count, (index + 1) * count) for name, count in size.items()}
        groups = [JoinedA(group.targets, group.cuts, group.a_IK[part[group.targets[0]]]) for group in self._groups()]
        return ExpertLora(_by_target(groups), {name: b[part[name]] for name, b in self.b_ERO.items()})

    def _groups(self) -> list[JoinedA]:
        return list(dict.fromkeys(self.groups.values()))


def expert_lora(a_EIR: Mapping[str, mx.array], b_ERO: Mapping[str, mx.array], joined: Sequence[Targets]) -> ExpertLora:
    """The weights of one version. `joined`: targets that are called with the same input, one after the other."""
    groups = [join_a({target: a_EIR[target] for target in group}) for group in present_groups(joined, a_EIR)]
    together = {target for group in groups for target in group.targets}
    groups += [JoinedA((target,), (), a) for target, a in a_EIR.items() if target not in together]
    return ExpertLora(_by_target(groups), b_ERO)


def stack_experts(versions: Sequence[ExpertLora]) -> ExpertLora:
    """All versions in this order; one that lacks a target, or has a smaller rank, has zeros there. Not evaluated."""
    if len({version.structure() for version in versions}) == 1:
        arrays = [mx.concatenate(parts) for parts in zip(*(version.arrays() for version in versions), strict=True)]
        return versions[0].structure().lora(arrays, len(versions))
    a_EIR: dict[str, mx.array] = {}
    b_ERO: dict[str, mx.array] = {}
    for target in dict.fromkeys(target for version in versions for target in version.b_ERO):
        a = [_of_target(version, target) for version in versions]
        b = [version.b_ERO.get(target) for version in versions]
        a_EIR[target], b_ERO[target] = _stacked(a, -1), _stacked(b, -2)
    groups = dict.fromkeys(group.targets for version in versions for group in version.groups.values())
    joined = [
        targets for targets in groups if len(targets) == max(len(group) for group in groups if targets[0] in group)
    ]
    stacked = expert_lora(a_EIR, b_ERO, joined)
    return ExpertLora(stacked.groups, stacked.b_ERO, len(versions))


def expert_rank(rank: int) -> int:
    """The rank of products: kernels read eight columns at once."""
    return rank + -rank % 8 if on_cuda() else rank


def _by_target(groups: Sequence[JoinedA]) -> dict[str, JoinedA]:
    return {target: group for group in groups for target in group.targets}


def _of_target(version: ExpertLora, target: str) -> mx.array | None:
    group = version.groups.get(target)
    return None if group is None else group.split(group.a_IK)[target]


def _stacked(arrays: Sequence[mx.array | None], axis: int) -> mx.array:
    """Arrays of several versions, one after the other, of one rank along `axis`; zeros for those that are None."""
    present = [array for array in arrays if array is not None]
    rank = max(array.shape[axis] for array in present)
    full = {id(array): padded(array, axis, 0, rank) for array in present}
    zeros = mx.zeros_like(next(iter(full.values())))
    return mx.concatenate([zeros if array is None else full[id(array)] for array in arrays])
