"""Gradient checkpointing by layer: a backward computes each layer's forward again instead of keeping what lies in it.

A pass then keeps one hidden state per token and layer, for about a third more computing
(https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.model.dropout import DropoutAdapter
from parallm.model.lora import Binding, LoraLinear, OneAdapter
from parallm.model.shared_model import SharedModel
from parallm.model.trained_lora import TrainedAdapter


def can_checkpoint(model: SharedModel) -> bool:
    """Whether the trunk calls its layers out of a list that can be exchanged."""
    return isinstance(getattr(trunk_of(model), "layers", None), list)


@contextmanager
def checkpointed(model: SharedModel, wanted: bool) -> Iterator[None]:
    """If `wanted`, let what is built inside the block keep only what goes from layer to layer."""
    if not wanted:
        yield
        return
    trunk = trunk_of(model)
    layers = trunk.layers
    trunk.layers = [_CheckpointedLayer(layer, model.binding) for layer in layers]
    try:
        yield
    finally:
        trunk.layers = layers


def trunk_of(model: SharedModel) -> nn.Module:
    trunk: nn.Module = model.base if model.trunk_owner is None else getattr(model.trunk_owner, model.trunk_name)
    return trunk


@dataclass(frozen=True, slots=True)
class _CheckpointedLayer:
    """Stands in for a layer while a pass is built."""

    layer: nn.Module
    binding: Binding

    def __call__(self, x: mx.array, *arguments: Any, **options: Any) -> Any:
        view = self.binding.view
        if not isinstance(view, OneAdapter | DropoutAdapter | TrainedAdapter):
            return self.layer(x, *arguments, **options)
        sites = [module.site for module in self.layer.modules() if isinstance(module, LoraLinear)]
        adapter = (view if isinstance(view, OneAdapter) else view.adapter).only(sites)
        structure = adapter.structure()

        def compute(x: mx.array, arrays: list[mx.array]) -> Any:
            part = structure.view(arrays)
            with self.binding.applied(part if isinstance(view, OneAdapter) else replace(view, adapter=part)):
                return self.layer(x, *arguments, **options)

        # gradients reach what is an argument, not what `compute` finds around it
        return mx.checkpoint(compute)(x, adapter.arrays())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)
