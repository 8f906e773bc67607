"""LoRA sites: linear layers of the frozen base that add the product of an adapter, chosen anew for each forward.

There is one module tree for serving and training. A site owns no adapter arrays: it asks the `Binding` that all sites
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

from parallm.model.attention import LEAST_COLUMNS
from parallm.model.cuda import on_cuda


@dataclass(frozen=True, slots=True)
class Scaling:
    """What stays as it is while an adapter's arrays are trained."""

    scales: Mapping[str, float]
    """Factor of each site's product."""
    norms_O: Mapping[str, mx.array]
    """Length of each output's weights, adapter included, that DoRA divides by; without entries for LoRA."""
    dtype: mx.Dtype = mx.float32
    """Of the factors in a forward. The arrays that are trained stay float32."""
    joined: Sequence[tuple[str, ...]] = ()
    """Sites that get the same input, such as queries, keys and values."""


class View(Protocol):
    """What the sites apply during one forward."""

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        """The output `y` (B, T, O) of `site`, and to it the adapter's product for its input `x` (B, T, I), if any."""

    def stretch(self, site: str) -> mx.array | None:
        """By how much more than 1 DoRA multiplies the outputs of `site`, (O,) or (B, 1, O), or None."""


@dataclass(frozen=True, slots=True)
class OneAdapter:
    """All rows use the same adapter. `b_RO` has the scale multiplied in."""

    a_IR: Mapping[str, mx.array]
    b_RO: Mapping[str, mx.array]
    stretch_O: Mapping[str, mx.array]
    joined: Mapping[str, "JoinedSites"] = field(default_factory=dict)

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        if site not in self.a_IR:
            return y
        hidden = self.joined[site].product(site, x) if site in self.joined else x @ self.a_IR[site]
        if on_cuda() and hidden.dtype == y.dtype:  # one kernel, which reads and writes `y` once
            return mx.addmm(y.flatten(0, -2), hidden.flatten(0, -2), self.b_RO[site]).reshape(y.shape)
        # .astype: factors in float32 beside a base in float16
        return y + (hidden @ self.b_RO[site]).astype(y.dtype)

    def stretch(self, site: str) -> mx.array | None:
        return self.stretch_O.get(site)

    def structure(self) -> "AdapterStructure":
        """What adapters have in common for which the same operations are computed."""
        groups = tuple((group.sites, group.cuts) for group in self._groups())
        return AdapterStructure(
            groups=groups,
            singles=tuple(site for site in self.a_IR if site not in self.joined),
            sites=tuple(self.b_RO),
            stretched=tuple(self.stretch_O),
        )

    def arrays(self) -> list[mx.array]:
        """All that a forward reads, in the order in which `AdapterStructure.view` takes them."""
        joined = [group.a_IK for group in self._groups()]
        singles = [a_IR for site, a_IR in self.a_IR.items() if site not in self.joined]
        return [*joined, *singles, *self.b_RO.values(), *self.stretch_O.values()]

    def only(self, sites: Sequence[str]) -> "OneAdapter":
        """What it adds at these sites; none of its groups may lie across their border."""
        joined = [
            JoinedSites(group.sites, group.cuts, group.a_IK) for group in self._groups() if group.sites[0] in sites
        ]
        a_IR, b_RO, stretch_O = (
            {site: part[site] for site in sites if site in part} for part in (self.a_IR, self.b_RO, self.stretch_O)
        )
        return OneAdapter(a_IR, b_RO, stretch_O, {site: group for group in joined for site in group.sites})

    def _groups(self) -> list["JoinedSites"]:
        return list(dict.fromkeys(self.joined.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStructure:
    """Names of an adapter's sites, without arrays."""

    groups: tuple[tuple[tuple[str, ...], tuple[int, ...] | None], ...]
    """Sites and cuts of the `JoinedSites`."""
    singles: tuple[str, ...]
    """Sites with an A of their own."""
    sites: tuple[str, ...]
    stretched: tuple[str, ...]

    def site_of_each(self) -> list[str]:
        """A site that reads it, for each of `OneAdapter.arrays`."""
        return [*(sites[0] for sites, _ in self.groups), *self.singles, *self.sites, *self.stretched]

    def view(self, arrays: Sequence[mx.array]) -> OneAdapter:
        """The view with other arrays, which `OneAdapter.arrays` gave."""
        rest = iter(arrays)
        joined = [JoinedSites(sites, cuts, next(rest)) for sites, cuts in self.groups]
        singles, b_RO, stretch_O = (
            {name: next(rest) for name in names} for names in (self.singles, self.sites, self.stretched)
        )
        a_IR = {site: part for group in joined for site, part in group.apart(group.a_IK).items()} | singles
        return OneAdapter(a_IR, b_RO, stretch_O, {site: group for group in joined for site in group.sites})


class JoinedSites:
    """Sites that are called with the same input, one after the other: one product with all their A serves them."""

    def __init__(self, sites: tuple[str, ...], cuts: tuple[int, ...] | None, a_IK: mx.array) -> None:
        """`cuts` are the columns at which a site's A ends and the next one's begins; None: B of each site takes the
        columns of all, and has zeros for those of others."""
        self.sites, self.cuts, self.a_IK = sites, cuts, a_IK
        self._x: mx.array | None = None  # the input that the parts are of; nothing is kept when all are fetched
        self._parts: dict[str, mx.array] = {}

    def product(self, site: str, x: mx.array, keeps_B1K: mx.array | None = None) -> mx.array:
        """`x` (B, T, I) times A of `site`, (B, T, R), with zeros where `keeps_B1K` of all columns is false."""
        if self._x is not x or site not in self._parts:
            self._x = x
            all_BTK = x @ self.a_IK
            if keeps_B1K is not None:
                all_BTK = mx.where(keeps_B1K, all_BTK, 0)
            self._parts = self.apart(all_BTK)
        part = self._parts.pop(site)
        if not self._parts:
            self._x = None
        return part

    def apart(self, columns: mx.array) -> dict[str, mx.array]:
        """The columns (..., K) that B of each site takes."""
        if self.cuts is None:
            return dict.fromkeys(self.sites, columns)
        return dict(zip(self.sites, mx.split(columns, list(self.cuts), axis=-1), strict=True))


class Binding:
    """The view that all sites of one model apply now."""

    def __init__(self) -> None:
        self.view: View | None = None  # written only by `applied`, on the device thread

    @contextmanager
    def applied(self, view: View | None) -> Iterator[None]:
        """Let the sites apply `view` inside the block; None leaves the base alone."""
        previous, self.view = self.view, view
        try:
            yield
        finally:
            self.view = previous


class Group(Protocol):
    """Computes the outputs of several sites at once; see `SiteGroup`."""

    def serves(self, view: View | None) -> bool: ...

    def output(self, site: str, x: mx.array, view: View | None) -> mx.array: ...


class LoraLinear(nn.Module):
    """A frozen linear layer and the name under which views know it."""

    def __init__(self, linear: nn.Module, site: str, binding: Binding) -> None:
        super().__init__()
        self.linear = linear
        self.site = site
        self.binding = binding
        self.group: Group | None = None

    def __call__(self, x: mx.array) -> mx.array:
        view = self.binding.view
        if self.group is not None and self.group.serves(view):
            return self.group.output(self.site, x, view)
        y = self.linear(x)
        if view is None:
            return y
        y = view.added(self.site, x, y)
        stretch = view.stretch(self.site)
        if stretch is None:
            return y
        # this form rather than a product with the whole factor: a stretch of zero changes no bit
        return y + (stretch * (y - self.linear.bias if "bias" in self.linear else y)).astype(y.dtype)


def join_sites(a_IR: Mapping[str, mx.array]) -> JoinedSites:
    """The matrices A of sites that get the same input, beside each other."""
    return JoinedSites(tuple(a_IR), _cuts(a_IR), mx.concatenate(list(a_IR.values()), axis=1))


def initial_arrays(
    sites: Mapping[str, tuple[int, int]],
    rank: int,
    key: mx.array,
    *,
    ranks: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """`{site}.lora_a` uniform in +-1/sqrt(inputs), `{site}.lora_b` zero: the product starts at zero. Evaluated.

    `ranks` are those of the sites that have another one than `rank`.
    """
    arrays: dict[str, mx.array] = {}
    keys = mx.random.split(key, len(sites))
    for (site, (inputs, outputs)), site_key in zip(sorted(sites.items()), keys, strict=True):
        bound, columns = 1 / math.sqrt(inputs), ranks.get(site, rank)
        arrays[f"{site}.lora_a"] = mx.random.uniform(-bound, bound, (inputs, columns), key=site_key)
        arrays[f"{site}.lora_b"] = mx.zeros((columns, outputs))
    mx.eval(arrays)
    return arrays


def one_adapter(arrays: Mapping[str, mx.array], scaling: Scaling, *, widens: bool = False) -> OneAdapter:
    """View of an adapter's arrays (`{site}.lora_a`, `{site}.lora_b`, for DoRA `{site}.m`).

    The scale is multiplied into B. Ranks are padded with zeros to what products take; see `_computed_rank`.
    `widens`: B of joined sites takes the columns of all, so that they are never cut apart. A GPU computes the wider
    product in the same time, and saves copies of the parts, forward and backward.
    """
    sites = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    ranks = {site: _computed_rank(arrays[f"{site}.lora_a"].shape[1]) for site in sites}
    a_IR = {site: padded(arrays[f"{site}.lora_a"], 1, 0, ranks[site]).astype(scaling.dtype) for site in sites}
    groups = [{site: a_IR[site] for site in group} for group in _present(scaling.joined, a_IR)]
    # of each B: zeros before its rows, and rows in all
    rows = {site: (0, ranks[site]) for site in sites}
    if widens:
        for group in groups:
            starts = (0, *_cuts(group))
            rows |= {site: (start, sum(ranks[one] for one in group)) for site, start in zip(group, starts, strict=True)}
    joined = [join_sites(group) for group in groups]
    if widens:
        joined = [JoinedSites(group.sites, None, group.a_IK) for group in joined]
    return OneAdapter(
        a_IR,
        {
            site: padded(arrays[f"{site}.lora_b"] * scaling.scales[site], 0, *rows[site]).astype(scaling.dtype)
            for site in sites
        },
        {site: arrays[f"{site}.m"] / norm_O - 1 for site, norm_O in scaling.norms_O.items()},
        {site: group for group in joined for site in group.sites},
    )


def _cuts(a_IR: Mapping[str, mx.array]) -> tuple[int, ...]:
    return tuple(accumulate(a.shape[1] for a in a_IR.values()))[:-1]


def _computed_rank(rank: int) -> int:
    """A CPU may round products of fewer columns in another way for each number of rows; kernels read eight at once."""
    if mx.default_device() == mx.Device(mx.cpu):
        return max(rank, LEAST_COLUMNS)
    return rank + -rank % 8 if on_cuda() else rank


def _present(groups: Sequence[tuple[str, ...]], a_IR: Mapping[str, mx.array]) -> list[list[str]]:
    """The groups without sites that the adapter lacks; a group of one is none."""
    found = [[site for site in group if site in a_IR] for group in groups]
    return [group for group in found if len(group) > 1]


def padded(matrix: mx.array, axis: int, before: int, size: int) -> mx.array:
    """With zeros around it along `axis`, `before` of them in front."""
    missing = (before, max(0, size - before - matrix.shape[axis]))
    return (
        mx.pad(matrix, [missing if axis == dimension else (0, 0) for dimension in range(2)]) if any(missing) else matrix
    )
