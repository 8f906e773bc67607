"""An adapter merged into its base: a whole model folder that programs without adapters load.

The base is read anew and lazily, in the type that it is stored in, and written file by file, so that neither the
serving model nor a second copy of the weights is held in memory.

DoRA: see `lora/dora.py`. Axes: E experts, O outputs, I inputs, R rank.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import dequantize_model, make_shards, quantize_model, save_config

from parallm.errors import AdapterError, ModelError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import write_arrays
from parallm.model.quantized import cast

logger = logging.getLogger(__name__)

KEPT_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Files of a model folder beside its weights: tokenizer, chat template, generation settings, own code."""
INDEX = "model.safetensors.index.json"
REPLACED_FILES = ("config.json", INDEX, "hf_quant_config.json")
DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """MLX's affine format for the weights of the fused model."""

    bits: int
    group_size: int


def fuse(
    base: nn.Module,
    config: Mapping[str, Any],
    adapter: Adapter,
    dtype: mx.Dtype | None,
    quantization: Quantization | None,
) -> dict[str, Any]:
    """Merge `adapter` into the weights of `base`, which are not quantized afterwards unless asked for.

    Without a `dtype` every array keeps its own; of a quantized base, that of its scales. Changes `base`; evaluates
    nothing. Returns the config that describes it. Raises AdapterError if the adapter does not fit the base, ModelError
    if no layer can be quantized so.
    """
    dequantize_model(base)
    layers = dict(base.named_modules())
    for target in adapter.targets:
        _check_layer(target, layers.get(target), adapter)
        weight = layers[target].weight
        layers[target].weight = merged_weight(weight, adapter, target).astype(weight.dtype if dtype is None else dtype)
    if dtype is not None:
        cast(base, dtype)
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    described = with_dtype(plain, str(layers[adapter.targets[0]].weight.dtype).removeprefix("mlx.core."))
    return described if quantization is None else _quantize(base, described, quantization)


def merged_weight(weight_OI: mx.array, adapter: Adapter, target: str) -> mx.array:
    """The weights with which a plain layer does what the adapted `target` does, (O, I) or (E, O, I) in float32."""
    a_IR, b_RO = adapter.arrays[f"{target}.lora_a"], adapter.arrays[f"{target}.lora_b"]
    merged = weight_OI.astype(mx.float32) + (a_IR @ (b_RO * adapter.scales[target])).swapaxes(-1, -2)
    if not adapter.is_dora:
        return merged
    return (adapter.arrays[f"{target}.m"] / mx.linalg.norm(merged, axis=1))[:, None] * merged


def write_model(base: nn.Module, config: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Write the arrays of `base`, `config`, and everything else that the model folder `source` holds.

    Evaluates one file after the other and takes the arrays out of `base`, so that only one file is in memory.
    Raises OSError if the disk does not take it.
    """
    folder.mkdir(parents=True)
    for path in (path for pattern in KEPT_FILES for path in source.glob(pattern)):
        if path.name not in REPLACED_FILES:
            shutil.copyfile(path, folder / path.name)
    save_config(dict(config), folder / "config.json", keep_vision_config=True)
    total_size, shards = model_bytes(base), make_shards(dict(tree_flatten(base.parameters())))
    base.update(tree_map(lambda _: mx.array([]), base.parameters()))
    weight_map: dict[str, str] = {}
    for number in range(1, len(shards) + 1):
        arrays, shards[number - 1] = shards[number - 1], {}
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_arrays(folder / name, arrays, {"format": "mlx"})
        weight_map |= dict.fromkeys(arrays, name)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def model_bytes(base: nn.Module) -> int:
    """Size of a model's arrays in memory and on disk."""
    return sum(array.nbytes for _, array in tree_flatten(base.parameters()))


def with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`config` with the type of the weights under the keys that say it, at the top and for the text model."""
    changed = {key: name if key in DTYPE_KEYS else value for key, value in config.items()}
    if isinstance(text := config.get("text_config"), Mapping):
        changed["text_config"] = {key: name if key in DTYPE_KEYS else value for key, value in text.items()}
    return changed if any(key in changed for key in DTYPE_KEYS) else changed | {"dtype": name}


def _quantize(base: nn.Module, config: dict[str, Any], quantization: Quantization) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as said:  # mlx-lm prints the bits per weight
        _, quantized = quantize_model(base, config, quantization.group_size, quantization.bits)
    if not any(isinstance(module, nn.QuantizedLinear) for module in base.modules()):
        raise ModelError(
            f"no layer of the model can be quantized with quantize.group_size={quantization.group_size}: it must "
            "divide a layer's inputs; choose a smaller one"
        )
    logger.info(said.getvalue().strip())
    return quantized


def _check_layer(target: str, layer: nn.Module | None, adapter: Adapter) -> None:
    *stack, inputs, _ = adapter.arrays[f"{target}.lora_a"].shape
    expected = (*stack, adapter.arrays[f"{target}.lora_b"].shape[-1], inputs)
    if not isinstance(layer, nn.Linear | SwitchLinear):
        raise AdapterError(f"the base has no layer {target}, which the adapter changes; set model.path to its base")
    if layer.weight.shape != expected:
        raise AdapterError(
            f"the adapter does not fit this base: {target} has weights of shape {layer.weight.shape}, the adapter is "
            f"for {expected}; set model.path to the base that it was trained on"
        )
