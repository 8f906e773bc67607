"""What training starts from: an adapter that was given, or a new one whose product is zero."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import read_adapter
from parallm.model.adapters.module_names import to_pattern
from parallm.model.lora.dora import initial_magnitudes
from parallm.model.lora.single import initial_arrays
from parallm.model.lora.targets import target_ranks
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix
from parallm.types import POLICY

RANK, ALPHA = 16, 32.0


def starting_adapter(
    settings: ModelSettings, model: SharedModel, seed: int, *, name: str = POLICY, is_trained: bool = True
) -> Adapter:
    """The given adapter, or version 0 of a new one.

    What `model.lora` says of the form counts for a new adapter. A given one has a form, and is trained with the dropout
    of `model.lora`, if there is one. Raises AdapterError, with one line for each key, if it is not of the form that is
    asked for.
    """
    if settings.adapter is None:
        return _new_adapter(settings.lora, model, seed, name)
    found = read_adapter(Path(settings.adapter), model.targets, model_type=model.model_type, name=name)
    if wrong := [*_contradictions(found, settings.lora, model, is_trained=is_trained)]:
        raise AdapterError("\n".join(f"the adapter in {settings.adapter} {line}" for line in wrong))
    dropout = found.dropout if settings.lora.dropout is None else settings.lora.dropout
    return dataclasses.replace(found, version=max(1, found.version), dropout=dropout)


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


def _contradictions(found: Adapter, lora: LoraSettings, model: SharedModel, *, is_trained: bool) -> Iterator[str]:
    for key, theirs, ours in (
        ("rank", found.rank, lora.rank),
        ("alpha", found.alpha, lora.alpha),
        ("rslora", found.rslora, lora.rslora),
        ("dora", found.is_dora, lora.dora),
    ):
        if ours is not None and ours != theirs:
            yield (
                f"has {key} {theirs}, the run {ours}; set model.lora.{key}={str(theirs).lower()}, or leave "
                f"model.lora.{key} out"
            )
    ranks = target_ranks(model.targets, lora.ranks, found.rank)
    if lora.ranks and dict(found.ranks) != {target: rank for target, rank in ranks.items() if target in found.targets}:
        pattern = json.dumps(to_pattern(found.ranks, found.targets)).replace('"', "")
        yield f"has other ranks than model.lora.ranks; set 'model.lora.ranks={pattern}', or leave model.lora.ranks out"
    missing = sorted(model.targets.keys() - set(found.targets))
    if is_trained and missing and (lora.targets, lora.layers) != (None, None):
        yield (
            f"adapts {len(found.targets)} layers, model.lora.targets and model.lora.layers choose {len(model.targets)}, "
            f"such as {missing[0]}; leave both out, or choose its layers"
        )
