"""Folders of encoders -> modules with their weights. `model/load.py` calls it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.model.encoders.bert import Bert, first_position
from parallm.model.encoders.modernbert import ModernBert
from parallm.model.task_head import is_of_head

MODULES: Mapping[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "bert": Bert,
    "modernbert": ModernBert,
    "roberta": Bert,
    "xlm-roberta": Bert,
}
"""Classes by `model_type`; `model/task_spec.py` names the same types."""
TRUNKS = ("bert.", "roberta.", "model.")
PRETRAINING = ("cls.", "lm_head.", "decoder.")
"""Beginnings of tensors of masked language models."""


def load_encoder(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The encoder in `folder`, its arrays not read yet, and `config` with the positions that texts can have.

    Raises ValueError, KeyError or RuntimeError for files that are not those of one.
    """
    encoder = MODULES[config["model_type"]](config)
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict), "safetensors are names and arrays"
        weights |= {_plain(name): array for name, array in loaded.items() if not _is_beside_trunk(name)}
    encoder.eval()
    encoder.load_weights(list(weights.items()), strict=True)
    positions = config["max_position_embeddings"]
    if config["model_type"] != "modernbert":
        positions -= first_position(config)
    return encoder, {**config, "max_position_embeddings": positions}


def _is_beside_trunk(name: str) -> bool:
    return is_of_head(name) or name.startswith(PRETRAINING) or name.endswith("embeddings.position_ids")


def _plain(name: str) -> str:
    """The name without the trunk's, and a norm's arrays as they are called since 2018."""
    for trunk in TRUNKS:
        name = name.removeprefix(trunk)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
