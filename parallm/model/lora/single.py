"""LoRA sites: linear layers of the frozen base that add the product of an adapter, chosen anew for each forward.

There is one module tree for serving and training. A site owns no adapter arrays: it asks the `LoraContext` that all sites
of a model share. Whoever runs a forward binds a view first, on the device thread.

LoRA: https://arxiv.org/abs/2106.09685. DoRA: `dora`. Axes: B rows, T tokens, I input, O output, R rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from parallm.model.attention import MIN_COLUMNS
from parallm.model.kernels.cuda import on_cuda


@dataclass(frozen=True, slots=True)
class LoraScaling:
    """What stays as it is while an adapter's arrays are trained."""

    scales: Mapping[str, float]
    """Factor of each site's product."""
    norms_O: Mapping[str, mx.array]
    """Length of each output's weights, adapter included, that DoRA divides by; without entries for LoRA."""
    dtype: mx.Dtype = mx.float32
    """Of the factors in a forward. The arrays that are trained stay float32."""
    joined: Sequence[tuple[str, ...]] = ()
    """Sites that get the same input, such as queries, keys and values."""


class LoraBinding(Protocol):
    """What the sites apply during one forward."""

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        """The output `y` (B, T, O) of `target`, and to it the adapter's product for its input `x` (B, T, I), if any."""

    def dora_scale(self, target: str) -> mx.array | None:
        """By how much more than 1 DoRA multiplies the outputs of `target`, (O,) or (B, 1, O), or None."""


@dataclass(frozen=True, slots=True)
class SingleLora:
    """All rows use the same adapter. `b_RO` has the scale multiplied in."""

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
        # .astype: factors in float32 beside a base in float16
        return y + (hidden @ self.b_RO[target]).astype(y.dtype)

    def dora_scale(self, target: str) -> mx.array | None:
        return self.dora_scale_O.get(target)

    def structure(self) -> "SingleStructure":
        """What adapters have in common for which the same operations are computed."""
        groups = tuple((group.targets, group.cuts) for group in self._groups())
        return SingleStructure(
            groups=groups,
            singles=tuple(target for target in self.a_IR if target not in self.joined),
            targets=tuple(self.b_RO),
            dora_targets=tuple(self.dora_scale_O),
        )

    def arrays(self) -> list[mx.array]:
        """All that a forward reads, in the order in which `SingleStructure.lora` takes them."""
        joined = [group.a_IK for group in self._groups()]
        singles = [a_IR for target, a_IR in self.a_IR.items() if target not in self.joined]
        return [*joined, *singles, *self.b_RO.values(), *self.dora_scale_O.values()]

    def only(self, targets: Sequence[str]) -> "SingleLora":
        """What it adds at these sites; none of its groups may lie across their border."""
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
    """Names of an adapter's sites, without arrays."""

    groups: tuple[tuple[tuple[str, ...], tuple[int, ...] | None], ...]
    """Sites and cuts of the `JoinedA`."""
    singles: tuple[str, ...]
    """Sites with an A of their own."""
    targets: tuple[str, ...]
    dora_targets: tuple[str, ...]

    def target_of_each(self) -> list[str]:
        """A site that reads it, for each of `SingleLora.arrays`."""
        return [*(targets[0] for targets, _ in self.groups), *self.singles, *self.targets, *self.dora_targets]

    def lora(self, arrays: Sequence[mx.array]) -> SingleLora:
        """The view with other arrays, which `SingleLora.arrays` gave."""
        rest = iter(arrays)
        joined = [JoinedA(targets, cuts, next(rest)) for targets, cuts in self.groups]
        singles, b_RO, dora_scale_O = (
            {name: next(rest) for name in names} for names in (self.singles, self.targets, self.dora_targets)
        )
        a_IR = {target: part for group in joined for target, part in group.apart(group.a_IK).items()} | singles
        return SingleLora(a_IR, b_RO, dora_scale_O, {target: group for group in joined for target in group.targets})


class JoinedA:
    """Sites that are called with the same input, one after the other: one product with all their A serves them."""

    def __init__(self, targets: tuple[str, ...], cuts: tuple[int, ...] | None, a_IK: mx.array) -> None:
        """`cuts` are the columns at which a site's A ends and the next one's begins; None: B of each site takes the
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
            self._parts = self.apart(all_BTK)
        part = self._parts.pop(target)
        if not self._parts:
            self._x = None
        return part

    def apart(self, columns: mx.array) -> dict[str, mx.array]:
        """The columns (..., K) that B of each site takes."""
        if self.cuts is None:
            return dict.fromkeys(self.targets, columns)
        return dict(zip(self.targets, mx.split(columns, list(self.cuts), axis=-1), strict=True))


class LoraContext:
    """The view that all sites of one model apply now."""

    def __init__(self) -> None:
        self.lora: LoraBinding | None = None  # written only by `applied`, on the device thread

    @contextmanager
    def applied(self, lora: LoraBinding | None) -> Iterator[None]:
        """Let the sites apply `lora` inside the block; None leaves the base alone."""
        previous, self.lora = self.lora, lora
        try:
            yield
        finally:
            self.lora = previous


class Group(Protocol):
    """Computes the outputs of several sites at once; see `MergedLinear`."""

    def serves(self, lora: LoraBinding | None) -> bool: ...

    def output(self, target: str, x: mx.array, lora: LoraBinding | None) -> mx.array: ...


class LoraLinear(nn.Module):
    """A frozen linear layer and the name under which views know it."""

    def __init__(self, linear: nn.Module, target: str, lora_context: LoraContext) -> None:
        super().__init__()
        self.linear = linear
        self.target = target
        self.lora_context = lora_context
        self.group: Group | None = None

    def __call__(self, x: mx.array) -> mx.array:
        lora = self.lora_context.lora
        if self.group is not None and self.group.serves(lora):
            return self.group.output(self.target, x, lora)
        y = self.linear(x)
        if lora is None:
            return y
        y = lora.apply(self.target, x, y)
        dora_scale = lora.dora_scale(self.target)
        if dora_scale is None:
            return y
        # this form rather than a product with the whole factor: a stretch of zero changes no bit
        return y + (dora_scale * (y - self.linear.bias if "bias" in self.linear else y)).astype(y.dtype)


def join_a(a_IR: Mapping[str, mx.array]) -> JoinedA:
    """The matrices A of sites that get the same input, beside each other."""
    return JoinedA(tuple(a_IR), _cuts(a_IR), mx.concatenate(list(a_IR.values()), axis=1))


def initial_arrays(
    targets: Mapping[str, tuple[int, int]],
    rank: int,
    key: mx.array,
    *,
    ranks: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """`{target}.lora_a` uniform in +-1/sqrt(inputs), `{target}.lora_b` zero: the product starts at zero. Evaluated.

    `ranks` are those of the sites that have another one than `rank`.
    """
    arrays: dict[str, mx.array] = {}
    keys = mx.random.split(key, len(targets))
    for (target, (inputs, outputs)), site_key in zip(sorted(targets.items()), keys, strict=True):
        bound, columns = 1 / math.sqrt(inputs), ranks.get(target, rank)
        arrays[f"{target}.lora_a"] = mx.random.uniform(-bound, bound, (inputs, columns), key=site_key)
        arrays[f"{target}.lora_b"] = mx.zeros((columns, outputs))
    mx.eval(arrays)
    return arrays


def single_lora(arrays: Mapping[str, mx.array], scaling: LoraScaling, *, widens: bool = False) -> SingleLora:
    """View of an adapter's arrays (`{target}.lora_a`, `{target}.lora_b`, for DoRA `{target}.m`).

    The scale is multiplied into B. Ranks are padded with zeros to what products take; see `_computed_rank`.
    `widens`: B of joined sites takes the columns of all, so that they are never cut apart. A GPU computes the wider
    product in the same time, and saves copies of the parts, forward and backward.
    """
    targets = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    ranks = {target: _computed_rank(arrays[f"{target}.lora_a"].shape[1]) for target in targets}
    a_IR = {target: padded(arrays[f"{target}.lora_a"], 1, 0, ranks[target]).astype(scaling.dtype) for target in targets}
    groups = [{target: a_IR[target] for target in group} for group in _present(scaling.joined, a_IR)]
    # of each B: zeros before its rows, and rows in all
    rows = {target: (0, ranks[target]) for target in targets}
    if widens:
        for group in groups:
            starts = (0, *_cuts(group))
            rows |= {
                target: (start, sum(ranks[one] for one in group)) for target, start in zip(group, starts, strict=True)
            }
    joined = [join_a(group) for group in groups]
    if widens:
        joined = [JoinedA(group.targets, None, group.a_IK) for group in joined]
    return SingleLora(
        a_IR,
        {
            target: padded(arrays[f"{target}.lora_b"] * scaling.scales[target], 0, *rows[target]).astype(scaling.dtype)
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
    """The groups without sites that the adapter lacks; a group of one is none."""
    found = [[target for target in group if target in a_IR] for group in groups]
    return [group for group in found if len(group) > 1]


def padded(matrix: mx.array, axis: int, before: int, size: int) -> mx.array:
    """With zeros around it along `axis`, `before` of them in front."""
    missing = (before, max(0, size - before - matrix.shape[axis]))
    return (
        mx.pad(matrix, [missing if axis == dimension else (0, 0) for dimension in range(2)]) if any(missing) else matrix
    )
