"""The view of one adapter while it is trained. Axes: I input, R rank, T tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from parallm.model.cuda import on_cuda
from parallm.model.lora import OneAdapter, View
from parallm.model.trained_lora import TrainedAdapter


@dataclass(frozen=True, slots=True)
class DropoutAdapter:
    """`OneAdapter` with inverted dropout before the product, for training only."""

    adapter: OneAdapter
    probability: float
    keys: Mapping[str, mx.array]

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        if site not in self.keys:
            return y
        kept = mx.random.bernoulli(1 - self.probability, x.shape, key=self.keys[site])
        return self.adapter.added(site, mx.where(kept, x / (1 - self.probability), 0).astype(x.dtype), y)

    def stretch(self, site: str) -> mx.array | None:
        return self.adapter.stretch(site)


def training_view(adapter: OneAdapter, probability: float, key: mx.array) -> View:
    """`adapter`, with dropout where `probability` is above 0: each site drops inputs of its own choice.

    With dropout `adapter` must not be widened (`one_adapter`).
    """
    if probability == 0:
        return TrainedAdapter(adapter) if on_cuda() else adapter
    keys = mx.random.split(key, len(adapter.a_IR))
    apart = replace(adapter, joined={})  # joined sites would share their input
    return DropoutAdapter(apart, probability, dict(zip(sorted(adapter.a_IR), keys, strict=True)))
