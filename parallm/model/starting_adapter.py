"""What training starts from: an adapter that was given, or a new one whose product is zero."""

import dataclasses
import json
from pathlib import Path

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapter import Adapter, make_adapter
from parallm.model.adapter_files import read_adapter
from parallm.model.dora import initial_magnitudes
from parallm.model.lora import initial_arrays
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.site_names import to_pattern
from parallm.model.sites import site_ranks
from parallm.seeds import mix
from parallm.types import POLICY


def starting_adapter(settings: ModelSettings, model: SharedModel, seed: int, name: str = POLICY) -> Adapter:
    """The given adapter, or version 0 of a new one. Raises AdapterError if the given one is not of the run's form."""
    if settings.adapter is not None:
        found = read_adapter(
            Path(settings.adapter), model.sites, model_type=model.model_type, rank=settings.lora.rank, name=name
        )
        _check_form(found, settings, model)
        return found if found.version > 0 else dataclasses.replace(found, version=1)
    lora = settings.lora
    ranks = site_ranks(model.sites, lora)
    arrays = initial_arrays(model.sites, lora.rank, mx.random.key(mix(seed, 0)), ranks=ranks)
    if lora.dora:
        arrays |= initial_magnitudes(model)
    return make_adapter(
        arrays,
        name=name,
        version=0,
        rank=lora.rank,
        alpha=lora.alpha,
        ranks=ranks,
        rslora=lora.rslora,
        dropout=lora.dropout,
    )


def _check_form(found: Adapter, settings: ModelSettings, model: SharedModel) -> None:
    """Raise AdapterError unless the adapter is of the form that `model.lora` describes."""
    for name, theirs, ours in (
        ("dora", found.is_dora, settings.lora.dora),
        ("rslora", found.rslora, settings.lora.rslora),
    ):
        if theirs != ours:
            raise AdapterError(
                f"the adapter in {settings.adapter} has {name} {theirs}, the run {ours}; "
                f"set model.lora.{name}={str(theirs).lower()}"
            )
    ranks = {site: rank for site, rank in site_ranks(model.sites, settings.lora).items() if site in found.targets}
    if dict(found.ranks) != ranks:
        pattern = json.dumps(to_pattern(found.ranks, found.targets)).replace('"', "")
        raise AdapterError(
            f"the ranks of the adapter in {settings.adapter} are not those of model.lora.ranks; set "
            f"'model.lora.ranks={pattern}'"
        )
