"""LoRA of one adapter for all rows, and the scaling that bindings share.

Axes: B rows, T tokens, I input, O output, R rank, K ranks of joined targets side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.model.kernels import grouped_gemm
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.experts import ExpertLora, ExpertStructure, Routing, expert_lora, expert_rank
from parallm.model.lora.joined import JoinedA, computed_rank, cuts_of, join_a, padded, present_groups

A_NAME = ".lora_a"


@dataclass(frozen=True, slots=True)
class LoraScaling:
    """Numbers that do not change while an adapter's arrays are trained."""

    scales: Mapping[str, float]
    """Factor of each target's product."""
    norms_O: Mapping[str, mx.array]
    """Lengths of each output's weights, adapter included, that DoRA divides by; empty for LoRA."""
    dtype: mx.Dtype = mx.float32
    """Type of LoRA weights in a forward. The arrays that are trained stay float32."""
    joined: Sequence[tuple[str, ...]] = ()
    """Targets that get the same input, such as queries, keys and values."""
    shift: float = 1.0
    """A power of two by which B is multiplied and A is divided: their product is the same."""


@dataclass(frozen=True, slots=True)
class SingleLora:
    """All rows use the same adapter. `b_RO` contains the scale."""

    a_IR: Mapping[str, mx.array]
    b_RO: Mapping[str, mx.array]
    dora_scale_O: Mapping[str, mx.array]
    joined: Mapping[str, JoinedA] = field(default_factory=dict)
    experts: ExpertLora = field(default_factory=ExpertLora)

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        if target not in self.a_IR:
            return y
        hidden = self.joined[target].product(target, x) if target in self.joined else x @ self.a_IR[target]
        if on_cuda() and hidden.dtype == y.dtype:  # one kernel, which reads and writes `y` once
            return mx.addmm(y.flatten(0, -2), hidden.flatten(0, -2), self.b_RO[target]).reshape(y.shape)
        # .astype: LoRA weights in float32 beside a base in float16
        return y + (hidden @ self.b_RO[target]).astype(y.dtype)

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        return self.experts.apply(target, x, y, routing)

    def dora_scale(self, target: str) -> mx.array | None:
        return self.dora_scale_O.get(target)

    def structure(self) -> "SingleStructure":
        """Equal for adapters for which the same operations are computed."""
        groups = tuple((group.targets, group.cuts) for group in self._groups())
        return SingleStructure(
            groups=groups,
            singles=tuple(target for target in self.a_IR if target not in self.joined),
            targets=tuple(self.b_RO),
            dora_targets=tuple(self.dora_scale_O),
            experts=self.experts.structure(),
        )

    def arrays(self) -> list[mx.array]:
        """All arrays that a forward reads, in the order of `SingleStructure.lora`."""
        joined = [group.a_IK for group in self._groups()]
        singles = [a_IR for target, a_IR in self.a_IR.items() if target not in self.joined]
        return [*joined, *singles, *self.b_RO.values(), *self.dora_scale_O.values(), *self.experts.arrays()]

    def only(self, targets: Sequence[str]) -> "SingleLora":
        """The part for these targets; a group lies inside or outside of them as a whole."""
        joined = [
            JoinedA(group.targets, group.cuts, group.a_IK) for group in self._groups() if group.targets[0] in targets
        ]
        a_IR, b_RO, dora_scale_O = (
            {target: part[target] for target in targets if target in part}
            for part in (self.a_IR, self.b_RO, self.dora_scale_O)
        )
        by_target = {target: group for group in joined for target in group.targets}
        return SingleLora(a_IR, b_RO, dora_scale_O, by_target, self.experts.only(targets))

    def _groups(self) -> list[JoinedA]:
        return list(dict.fromkeys(self.joined.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStructure:
    """Names of an adapter's targets, without arrays."""

    groups: tuple[tuple[tuple[str, ...], tuple[int, ...] | None], ...]
    """Targets and cuts of each `JoinedA`."""
    singles: tuple[str, ...]
    """Targets with an A of their own."""
    targets: tuple[str, ...]
    dora_targets: tuple[str, ...]
    experts: ExpertStructure

    def target_of_each(self) -> list[str]:
        """A target that reads it, for each of `SingleLora.arrays`."""
        linears = [*(targets[0] for targets, _ in self.groups), *self.singles, *self.targets, *self.dora_targets]
        return linears + self.experts.target_of_each()

    def lora(self, arrays: Sequence[mx.array]) -> SingleLora:
        """The binding with other arrays, in the order of `SingleLora.arrays`."""
        remaining = iter(arrays)
        joined = [JoinedA(targets, cuts, next(remaining)) for targets, cuts in self.groups]
        singles, b_RO, dora_scale_O = (
            {name: next(remaining) for name in names} for names in (self.singles, self.targets, self.dora_targets)
        )
        a_IR = {target: part for group in joined for target, part in group.split(group.a_IK).items()} | singles
        by_target = {target: group for group in joined for target in group.targets}
        return SingleLora(a_IR, b_RO, dora_scale_O, by_target, self.experts.lora([*remaining]))


def single_lora(arrays: Mapping[str, mx.array], scaling: LoraScaling, *, widens: bool = False) -> SingleLora:
    """The binding of an adapter's arrays (`{target}.lora_a`, `{target}.lora_b`, for DoRA `{target}.m`).

    The scale is multiplied into B. Ranks are padded with zeros to what products take; see `computed_rank`.
    `widens`: B of joined targets takes the columns of all, so that these are never split. A GPU computes the wider
    product in the same time, and saves copies of the parts, forward and backward.
    """
    ranks = {target: computed_rank(rank) for target, rank in matrix_ranks(arrays).items()}
    targets = list(ranks)
    a_IR = {target: arrays[f"{target}.lora_a"] for target in targets}
    if scaling.shift != 1:
        a_IR = {target: array / scaling.shift for target, array in a_IR.items()}
    a_IR = {target: padded(array, 1, 0, ranks[target]).astype(scaling.dtype) for target, array in a_IR.items()}
    factors = {target: scaling.scales[target] * scaling.shift for target in targets}
    groups = [{target: a_IR[target] for target in group} for group in present_groups(scaling.joined, a_IR)]
    # for each B: zeros before its rows, and its number of rows
    rows = {target: (0, ranks[target]) for target in targets}
    if widens:
        for group in groups:
            starts = (0, *cuts_of(group))
            rows |= {
                target: (start, sum(ranks[other] for other in group))
                for target, start in zip(group, starts, strict=True)
            }
    joined = [join_a(group) for group in groups]
    if widens:
        joined = [JoinedA(group.targets, None, group.a_IK) for group in joined]
    return SingleLora(
        a_IR,
        {
            target: padded(arrays[f"{target}.lora_b"] * factors[target], 0, *rows[target]).astype(scaling.dtype)
            for target in targets
        },
        {target: arrays[f"{target}.m"] / norm_O - 1 for target, norm_O in scaling.norms_O.items()},
        {target: group for group in joined for target in group.targets},
        expert_part(arrays, scaling),
    )


def matrix_ranks(arrays: Mapping[str, mx.array]) -> dict[str, int]:
    """The ranks of an adapter's targets, without those of experts."""
    a_IR = {name.removesuffix(A_NAME): array for name, array in arrays.items() if name.endswith(A_NAME)}
    return {target: array.shape[1] for target, array in a_IR.items() if array.ndim == 2}


def expert_part(arrays: Mapping[str, mx.array], scaling: LoraScaling) -> ExpertLora:
    """The part of an adapter for layers that hold a matrix for each expert."""
    a_EIR: dict[str, mx.array] = {}
    b_ERO: dict[str, mx.array] = {}
    adapted = {name.removesuffix(A_NAME) for name in arrays if name.endswith(A_NAME)}
    for target in sorted(adapted - matrix_ranks(arrays).keys()):
        a, b = arrays[f"{target}.lora_a"] / scaling.shift, arrays[f"{target}.lora_b"]
        rank = expert_rank(a.shape[-1])
        a_EIR[target] = padded(a, -1, 0, rank).astype(scaling.dtype)
        b_ERO[target] = padded(b * (scaling.scales[target] * scaling.shift), -2, 0, rank).astype(scaling.dtype)
    experts = expert_lora(a_EIR, b_ERO, scaling.joined)
    return experts.widened() if grouped_gemm.has_kernel() else experts
