"""The adapter that training starts from: the given one, or a new one whose product is zero."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import read_adapter
from parallm.model.adapters.module_names import to_pattern
from parallm.model.lora.dora import initial_magnitudes
from parallm.model.lora.targets import Shape, target_ranks
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix
from parallm.types import POLICY

RANK, ALPHA = 16, 32.0


def starting_adapter(
    settings: ModelSettings, model: SharedModel, seed: int, *, name: str = POLICY, is_trained: bool = True
) -> Adapter:
    """The given adapter, or version 0 of a new one.

    `model.lora` gives the form of a new adapter. A given adapter keeps its form, and is trained with the dropout of
    `model.lora`, if there is one. Raises AdapterError, with one line for each key that asks for another form.
    """
    if settings.adapter is None:
        return _new_adapter(settings.lora, model, seed, name)
    adapter = read_adapter(Path(settings.adapter), model.targets, model_type=model.model_type, name=name)
    if wrong := [*_contradictions(adapter, settings.lora, model, is_trained=is_trained)]:
        raise AdapterError("\n".join(f"the adapter in {settings.adapter} {line}" for line in wrong))
    dropout = adapter.dropout if settings.lora.dropout is None else settings.lora.dropout
    return dataclasses.replace(adapter, version=max(1, adapter.version), dropout=dropout)


def initial_arrays(
    targets: Mapping[str, Shape],
    rank: int,
    key: mx.array,
    *,
    ranks: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """`{target}.lora_a` uniform in +-1/sqrt(inputs), `{target}.lora_b` zero: the product starts at zero. Evaluated.

    `targets` are their shapes (inputs, outputs), or (experts, inputs, outputs); `ranks` are those of the targets whose
    rank is not `rank`.
    """
    arrays: dict[str, mx.array] = {}
    keys = mx.random.split(key, len(targets))
    for (target, (*stack, inputs, outputs)), target_key in zip(sorted(targets.items()), keys, strict=True):
        bound, columns = 1 / math.sqrt(inputs), ranks.get(target, rank)
        arrays[f"{target}.lora_a"] = mx.random.uniform(-bound, bound, (*stack, inputs, columns), key=target_key)
        arrays[f"{target}.lora_b"] = mx.zeros((*stack, columns, outputs))
    mx.eval(arrays)
    return arrays


def _new_adapter(lora: LoraSettings, model: SharedModel, seed: int, name: str) -> Adapter:
    rank = lora.rank or RANK
    ranks = target_ranks(model.targets, lora.ranks, rank)
    arrays = initial_arrays(model.targets, rank, mx.random.key(mix(seed, 0)), ranks=ranks)
    if lora.dora:
        arrays |= initial_magnitudes(model)
    return make_adapter(
        arrays,
        name=name,
        version=0,
        rank=rank,
        alpha=lora.alpha or ALPHA,
        ranks=ranks,
        rslora=bool(lora.rslora),
        dropout=lora.dropout or 0.0,
    )


def _contradictions(adapter: Adapter, lora: LoraSettings, model: SharedModel, *, is_trained: bool) -> Iterator[str]:
    for key, given, asked in (
        ("rank", adapter.rank, lora.rank),
        ("alpha", adapter.alpha, lora.alpha),
        ("rslora", adapter.rslora, lora.rslora),
        ("dora", adapter.is_dora, lora.dora),
    ):
        if asked is not None and asked != given:
            yield (
                f"has {key} {given}, the run {asked}; set model.lora.{key}={str(given).lower()}, or leave "
                f"model.lora.{key} out"
            )
    ranks = target_ranks(model.targets, lora.ranks, adapter.rank)
    own_ranks = {target: rank for target, rank in ranks.items() if target in adapter.targets}
    if lora.ranks and dict(adapter.ranks) != own_ranks:
        pattern = json.dumps(to_pattern(adapter.ranks, adapter.targets)).replace('"', "")
        yield f"has other ranks than model.lora.ranks; set 'model.lora.ranks={pattern}', or leave model.lora.ranks out"
    missing = sorted(model.targets.keys() - set(adapter.targets))
    if is_trained and missing and (lora.targets, lora.layers) != (None, None):
        yield (
            f"adapts {len(adapter.targets)} layers, model.lora.targets and model.lora.layers choose "
            f"{len(model.targets)}, such as {missing[0]}; leave both out, or choose its layers"
        )
