"""LoRA of one adapter for all rows, and what bindings share: scaling, and A of targets that get the same input.

Axes: B rows, T tokens, I input, O output, R rank, K ranks of joined targets side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx

from parallm.model.attention import MIN_COLUMNS
from parallm.model.kernels.cuda import on_cuda


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
    joined: Mapping[str, "JoinedA"] = field(default_factory=dict)

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        if target not in self.a_IR:
            return y
        hidden = self.joined[target].product(target, x) if target in self.joined else x @ self.a_IR[target]
        if on_cuda() and hidden.dtype == y.dtype:  # one kernel, which reads and writes `y` once
            return mx.addmm(y.flatten(0, -2), hidden.flatten(0, -2), self.b_RO[target]).reshape(y.shape)
        # .astype: LoRA weights in float32 beside a base in float16
        return y + (hidden @ self.b_RO[target]).astype(y.dtype)

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
        )

    def arrays(self) -> list[mx.array]:
        """All arrays that a forward reads, in the order of `SingleStructure.lora`."""
        joined = [group.a_IK for group in self._groups()]
        singles = [a_IR for target, a_IR in self.a_IR.items() if target not in self.joined]
        return [*joined, *singles, *self.b_RO.values(), *self.dora_scale_O.values()]

    def only(self, targets: Sequence[str]) -> "SingleLora":
        """The part for these targets; a group lies inside or outside of them as a whole."""
        joined = [
            JoinedA(group.targets, group.cuts, group.a_IK) for group in self._groups() if group.targets[0] in targets
        ]
        a_IR, b_RO, dora_scale_O = (
            {target: part[target] for target in targets if target in part}
            for part in (self.a_IR, self.b_RO, self.dora_scale_O)
        )
        return SingleLora(a_IR, b_RO, dora_scale_O, {target: group for group in joined for target in group.targets})

    def _groups(self) -> list["JoinedA"]:
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

    def target_of_each(self) -> list[str]:
        """A target that reads it, for each of `SingleLora.arrays`."""
        return [*(targets[0] for targets, _ in self.groups), *self.singles, *self.targets, *self.dora_targets]

    def lora(self, arrays: Sequence[mx.array]) -> SingleLora:
        """The binding with other arrays, in the order of `SingleLora.arrays`."""
        remaining = iter(arrays)
        joined = [JoinedA(targets, cuts, next(remaining)) for targets, cuts in self.groups]
        singles, b_RO, dora_scale_O = (
            {name: next(remaining) for name in names} for names in (self.singles, self.targets, self.dora_targets)
        )
        a_IR = {target: part for group in joined for target, part in group.split(group.a_IK).items()} | singles
        return SingleLora(a_IR, b_RO, dora_scale_O, {target: group for group in joined for target in group.targets})


class JoinedA:
    """Targets that are called with the same input, one after the other: one product with all their A serves them."""

    def __init__(self, targets: tuple[str, ...], cuts: tuple[int, ...] | None, a_IK: mx.array) -> None:
        """`cuts` are the columns at which a target's A ends and the next one's begins; None: B of each target takes the
        columns of all, and has zeros for those of others."""
        self.targets, self.cuts, self.a_IK = targets, cuts, a_IK
        self._x: mx.array | None = None  # the input that the parts are of; nothing is kept when all are fetched
        self._parts: dict[str, mx.array] = {}

    def product(self, target: str, x: mx.array, keeps_B1K: mx.array | None = None) -> mx.array:
        """`x` (B, T, I) times A of `target`, (B, T, R), with zeros where `keeps_B1K` of all columns is false."""
        if self._x is not x or target not in self._parts:
            self._x = x
            all_BTK = x @ self.a_IK
            if keeps_B1K is not None:
                all_BTK = mx.where(keeps_B1K, all_BTK, 0)
            self._parts = self.split(all_BTK)
        part = self._parts.pop(target)
        if not self._parts:
            self._x = None
        return part

    def split(self, columns: mx.array) -> dict[str, mx.array]:
        """The columns (..., K) that B of each target takes."""
        if self.cuts is None:
            return dict.fromkeys(self.targets, columns)
        return dict(zip(self.targets, mx.split(columns, list(self.cuts), axis=-1), strict=True))


def join_a(a_IR: Mapping[str, mx.array]) -> JoinedA:
    """The matrices A of targets that get the same input, beside each other."""
    return JoinedA(tuple(a_IR), _cuts(a_IR), mx.concatenate(list(a_IR.values()), axis=1))


def single_lora(arrays: Mapping[str, mx.array], scaling: LoraScaling, *, widens: bool = False) -> SingleLora:
    """The binding of an adapter's arrays (`{target}.lora_a`, `{target}.lora_b`, for DoRA `{target}.m`).

    The scale is multiplied into B. Ranks are padded with zeros to what products take; see `_computed_rank`.
    `widens`: B of joined targets takes the columns of all, so that these are never split. A GPU computes the wider
    product in the same time, and saves copies of the parts, forward and backward.
    """
    targets = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    ranks = {target: _computed_rank(arrays[f"{target}.lora_a"].shape[1]) for target in targets}
    a_IR = {target: arrays[f"{target}.lora_a"] for target in targets}
    if scaling.shift != 1:
        a_IR = {target: array / scaling.shift for target, array in a_IR.items()}
    a_IR = {target: padded(array, 1, 0, ranks[target]).astype(scaling.dtype) for target, array in a_IR.items()}
    factors = {target: scaling.scales[target] * scaling.shift for target in targets}
    groups = [{target: a_IR[target] for target in group} for group in _present(scaling.joined, a_IR)]
    # for each B: zeros before its rows, and its number of rows
    rows = {target: (0, ranks[target]) for target in targets}
    if widens:
        for group in groups:
            starts = (0, *_cuts(group))
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
    )


def _cuts(a_IR: Mapping[str, mx.array]) -> tuple[int, ...]:
    return tuple(accumulate(a.shape[1] for a in a_IR.values()))[:-1]


def _computed_rank(rank: int) -> int:
    """A CPU may round products of fewer columns in another way for each number of rows; kernels read eight at once."""
    if mx.default_device() == mx.Device(mx.cpu):
        return max(rank, MIN_COLUMNS)
    return rank + -rank % 8 if on_cuda() else rank


def _present(groups: Sequence[tuple[str, ...]], a_IR: Mapping[str, mx.array]) -> list[list[str]]:
    """The groups without targets that the adapter lacks; a single target is no group."""
    present = [[target for target in group if target in a_IR] for group in groups]
    return [group for group in present if len(group) > 1]


def padded(matrix: mx.array, axis: int, before: int, size: int) -> mx.array:
    """`matrix` with zeros around it along `axis`, `before` of them in front."""
    missing = (before, max(0, size - before - matrix.shape[axis]))
    return (
        mx.pad(matrix, [missing if axis == dimension else (0, 0) for dimension in range(2)]) if any(missing) else matrix
    )
