"""LoRA sites: linear layers of the frozen base that add the product of an adapter, chosen anew for each forward.

There is one module tree for serving and training. A site owns no adapter arrays: it asks the `Binding` that all sites
of a model share. Whoever runs a forward binds a view first, on the device thread.

LoRA: https://arxiv.org/abs/2106.09685. Axes: B rows, T tokens, I input, O output, R rank, S stacked adapters.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from parallm.errors import AdapterError
from parallm.model.attention import at_least_rows
from parallm.model.settings import LoraSettings


class View(Protocol):
    """What the sites apply during one forward."""

    def delta(self, site: str, x: mx.array) -> mx.array | None:
        """The adapter's product for the input `x` (B, T, I) of `site`, (B, T, O) in the dtype of `x`, or None."""


@dataclass(frozen=True, slots=True)
class OneAdapter:
    """All rows use the same adapter. `b_RO` has the scale alpha / rank multiplied in."""

    a_IR: Mapping[str, mx.array]
    b_RO: Mapping[str, mx.array]

    def delta(self, site: str, x: mx.array) -> mx.array | None:
        if site not in self.a_IR:
            return None
        return ((x @ self.a_IR[site]) @ self.b_RO[site]).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class DropoutAdapter:
    """`OneAdapter` with inverted dropout before the product, for training only."""

    adapter: OneAdapter
    probability: float
    keys: Mapping[str, mx.array]

    def delta(self, site: str, x: mx.array) -> mx.array | None:
        if site not in self.keys:
            return None
        kept = mx.random.bernoulli(1 - self.probability, x.shape, key=self.keys[site])
        return self.adapter.delta(site, mx.where(kept, x / (1 - self.probability), 0).astype(x.dtype))


@dataclass(frozen=True, slots=True)
class MixedAdapters:
    """Row b uses the adapter at `index_B[b]` of the stacks; a stack entry of zeros is the base."""

    a_SIR: Mapping[str, mx.array]
    b_SRO: Mapping[str, mx.array]
    index_B: mx.array

    def delta(self, site: str, x: mx.array) -> mx.array | None:
        if site not in self.a_SIR:
            return None
        rows = at_least_rows(x.astype(mx.float32), axis=1)
        hidden = mx.gather_mm(rows, self.a_SIR[site], rhs_indices=self.index_B)
        return mx.gather_mm(hidden, self.b_SRO[site], rhs_indices=self.index_B)[:, : x.shape[1]].astype(x.dtype)


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


class LoraLinear(nn.Module):
    """A frozen linear layer and the name under which views know it."""

    def __init__(self, linear: nn.Module, site: str, binding: Binding) -> None:
        super().__init__()
        self.linear = linear
        self.site = site
        self.binding = binding

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        view = self.binding.view
        delta = None if view is None else view.delta(self.site, x)
        return y if delta is None else y + delta


def install_sites(base: nn.Module, settings: LoraSettings, binding: Binding) -> dict[str, tuple[int, int]]:
    """Wrap the linear layers of `base` that `settings.targets` names. Returns site -> (inputs, outputs).

    Raises AdapterError naming the targets that no linear layer of the model has.
    """
    in_layers = {id(module) for layer in base.layers for module in layer.modules()}  # neither embedding nor head
    linears = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and id(module) in in_layers
    }
    chosen = _chosen(linears, settings.targets)
    wrapped = [(name, LoraLinear(linears[name], name, binding)) for name in chosen]
    base.update_modules(tree_unflatten(wrapped))
    return {name: _linear_shape(linears[name]) for name in chosen}


def initial_arrays(sites: Mapping[str, tuple[int, int]], rank: int, key: mx.array) -> dict[str, mx.array]:
    """`{site}.lora_a` uniform in +-1/sqrt(inputs), `{site}.lora_b` zero: the product starts at zero. Evaluated."""
    arrays: dict[str, mx.array] = {}
    keys = mx.random.split(key, len(sites))
    for (site, (inputs, outputs)), site_key in zip(sorted(sites.items()), keys, strict=True):
        bound = 1 / math.sqrt(inputs)
        arrays[f"{site}.lora_a"] = mx.random.uniform(-bound, bound, (inputs, rank), key=site_key)
        arrays[f"{site}.lora_b"] = mx.zeros((rank, outputs))
    mx.eval(arrays)
    return arrays


def one_adapter(arrays: Mapping[str, mx.array], scale: float) -> OneAdapter:
    """View of an adapter's arrays (`{site}.lora_a`, `{site}.lora_b`); the scale is multiplied into B."""
    return OneAdapter(
        {name.removesuffix(".lora_a"): a for name, a in arrays.items() if name.endswith(".lora_a")},
        {name.removesuffix(".lora_b"): b * scale for name, b in arrays.items() if name.endswith(".lora_b")},
    )


def stack_adapters(adapters: list[OneAdapter | None], sites: Mapping[str, tuple[int, int]]) -> MixedAdapters:
    """Stack adapters (None: the base) for `MixedAdapters`; ranks are padded with zeros. `index_B` is empty."""
    rank = max(a.shape[1] for adapter in adapters if adapter for a in adapter.a_IR.values())
    stacks_a: dict[str, mx.array] = {}
    stacks_b: dict[str, mx.array] = {}
    for site, (inputs, outputs) in sites.items():
        parts = [(_or_none(adapter, site)) for adapter in adapters]
        if all(part is None for part in parts):
            continue
        stacks_a[site] = mx.stack([_padded(part[0], 1, rank) if part else mx.zeros((inputs, rank)) for part in parts])
        stacks_b[site] = mx.stack([_padded(part[1], 0, rank) if part else mx.zeros((rank, outputs)) for part in parts])
    return MixedAdapters(stacks_a, stacks_b, mx.zeros((0,), mx.uint32))


def _or_none(adapter: OneAdapter | None, site: str) -> tuple[mx.array, mx.array] | None:
    if adapter is None or site not in adapter.a_IR:
        return None
    return adapter.a_IR[site], adapter.b_RO[site]


def _padded(matrix: mx.array, axis: int, rank: int) -> mx.array:
    missing = rank - matrix.shape[axis]
    widths = [(0, missing if axis == dimension else 0) for dimension in range(2)]
    return mx.pad(matrix.astype(mx.float32), widths) if missing else matrix.astype(mx.float32)


def _chosen(linears: Mapping[str, nn.Module], targets: str | tuple[str, ...]) -> list[str]:
    if targets == "all-linear":
        return sorted(linears)
    wanted = (targets,) if isinstance(targets, str) else targets
    chosen = [name for name in linears if any(name == w or name.endswith(f".{w}") for w in wanted)]
    missing = [w for w in wanted if not any(name == w or name.endswith(f".{w}") for name in chosen)]
    if missing:
        known = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise AdapterError(
            f"model.lora.targets: the model has no linear layer {missing}; choices: all-linear or of {known}"
        )
    return sorted(chosen)


def _linear_shape(linear: nn.Module) -> tuple[int, int]:
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs
