"""A folder that `folder.py` made of a GGUF file -> mlx-lm's model with its weights. Runs on the device thread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from parallm.model.gguf.blocks import GROUP, PACKED, read_dense, read_packed
from parallm.model.gguf.file import GgufFile, Tensor
from parallm.model.gguf.folder import weights_of
from parallm.model.gguf.names import Source, find_sources
from parallm.model.gguf.parts import read_parts


def load_gguf(folder: Path, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a folder's weights and `config`. Layers of packed weights are quantized ones with float32 scales.

    Raises ModelError for a file that is not that model, and ValueError for numbers that are none.
    """
    file = read_parts(weights_of(folder))  # errors name what the user named
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    sources = getattr(model, "sanitize", dict)(find_sources(file))
    _check_shapes(file, sources, model)
    weights, forms = dict[str, mx.array](), dict[str, dict[str, Any]]()
    for name, source in sources.items():
        layer = name.removesuffix(".weight")
        if source.tensor.kind.name in PACKED:
            arrays, forms[layer] = _packed(source)
            weights |= {f"{layer}.{part}": array for part, array in arrays.items()}
        else:
            weights[name] = _dense(source)
    nn.quantize(model, class_predicate=lambda layer, _: forms.get(layer, False))
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model, config


def _check_shapes(file: GgufFile, sources: Mapping[str, Source], model: nn.Module) -> None:
    """Raise ModelError for tensors of other shapes than those of the model's arrays, and for packed vectors."""
    arrays = dict(tree_flatten(model.parameters()))
    for name, source in sources.items():
        tensor = source.tensor
        if name not in arrays or tensor.shape != arrays[name].shape:
            expected = arrays[name].shape if name in arrays else "no such array"
            raise file.error(f"the tensor {tensor.name!r} has the shape {tensor.shape}, the model has {expected}")
        if len(tensor.shape) != 2 and tensor.kind.elements > 1:
            raise file.error(f"the tensor {tensor.name!r} is a vector of the type {tensor.kind.name}")
    if missing := sorted(arrays.keys() - sources.keys()):
        raise file.error(f"it has nothing for {missing[0]} of the model")


def _packed(source: Source) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The arrays of a quantized layer by their names, and its form."""
    packed = read_packed(_ordered(source))
    arrays = {"weight": mx.array(packed.weight_OW), "scales": mx.array(packed.scales_OG)}
    if packed.biases_OG is not None:
        arrays["biases"] = mx.array(packed.biases_OG)
    return arrays, {"group_size": GROUP, "bits": packed.bits, "mode": packed.mode}


def _dense(source: Source) -> mx.array:
    tensor = _ordered(source)
    array = mx.array(np.ascontiguousarray(read_dense(tensor)))
    if tensor.kind.name == "BF16":
        array = array.view(mx.bfloat16)
    return array + source.offset if source.offset else array


def _ordered(source: Source) -> Tensor:
    """The tensor with its rows in the model's order."""
    tensor = source.tensor
    if source.order_O is None:
        return tensor
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return Tensor(tensor.name, tensor.kind, tensor.shape, rows[source.order_O].reshape(-1))
