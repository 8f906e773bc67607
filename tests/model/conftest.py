from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.lora.dora import initial_magnitudes
from parallm.model.lora.targets import target_ranks
from parallm.model.settings import LoraSettings
from parallm.model.shared_model import SharedModel


@pytest.fixture
def variant() -> Callable[..., Adapter]:
    """An adapter of any form with products and stretches that are not zero: `variant(model, 3, rank=2, dora=True)`."""

    def make(model: SharedModel, version: int = 1, *, rank: int = 4, **fields: object) -> Adapter:
        lora = LoraSettings(rank=rank, **fields)  # type: ignore[arg-type]  # by name, from the test
        ranks = target_ranks(model.targets, lora.ranks, rank)
        arrays = initial_arrays(model.targets, rank, mx.random.key(version), ranks=ranks)
        magnitudes = initial_magnitudes(model) if lora.dora else {}
        keys = iter(mx.random.split(mx.random.key(100 + version), len(arrays) + len(magnitudes)))
        arrays = {name: mx.random.normal(array.shape, key=next(keys)) * 0.2 for name, array in arrays.items()}
        arrays |= {name: m * mx.random.uniform(0.5, 1.5, m.shape, key=next(keys)) for name, m in magnitudes.items()}
        rslora = bool(lora.rslora)
        return make_adapter(arrays, version=version, rank=rank, alpha=2.0 * rank, ranks=ranks, rslora=rslora)

    return make
