"""Folders of a causal trunk without its language model's head, as embedders and classifiers have them.

mlx-lm's loader wants every tensor of the language model and no other. `model/load.py` asks here what to tell it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from parallm.model.task_head import is_of_head
from parallm.model.task_spec import is_trunk, writes_text

HEAD = "lm_head.weight"
ModelClasses = tuple[Callable[[Any], nn.Module], Any]


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a folder; reads their headers only. Raises RuntimeError for a broken file."""
    return frozenset(name for file in folder.glob("model*.safetensors") for name in mx.load(str(file)))


def overrides(config: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Values that replace those of config.json: without a head of its own the model gets that of its embeddings."""
    return {} if HEAD in names or writes_text(config, names) else {"tie_word_embeddings": True}


def classes(config: Mapping[str, Any]) -> ModelClasses:
    """mlx-lm's class of a model, which takes the tensors of a trunk, and leaves out those of a classifier's head."""
    model_class, arguments = _get_classes(config)

    def make(values: SimpleNamespace) -> nn.Module:
        model: nn.Module = model_class(values)
        own = getattr(model, "sanitize", dict)
        # read by mlx-lm while it loads
        object.__setattr__(model, "sanitize", lambda weights: own(_of_model(weights)))
        return model

    return make, arguments


def _of_model(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    prefix = "model." if is_trunk(frozenset(weights)) else ""
    return {f"{prefix}{name}": array for name, array in weights.items() if not is_of_head(name)}
