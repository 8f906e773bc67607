"""Names of tensors in GGUF files <-> those of mlx-lm's models, and how their numbers differ. Imports no MLX.

The names: https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/tensor_mapping.py`. A tensor that is not known here is
refused, and so is a file that lacks one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallm.model.gguf.config import ARCHITECTURES
from parallm.model.gguf.file import GgufFile, Tensor

WHOLE: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROTARY = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are part of config.json."""
_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    "attn_output.weight": "self_attn.o_proj.weight",
}
_MLP = {f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_NORM = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
LAYER: Mapping[str, Mapping[str, str]] = {
    "llama": _ATTENTION | _MLP | _NORM,
    "qwen2": _ATTENTION | _MLP | _NORM | _BIASES,
    "qwen3": _ATTENTION | _MLP | _NORM | _HEAD_NORMS,
    "gemma2": _ATTENTION | _MLP | _GEMMA_NORMS,
    "gemma3": _ATTENTION | _MLP | _GEMMA_NORMS | _HEAD_NORMS,
    "phi3": {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_qkv.weight": "self_attn.qkv_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_up.weight": "mlp.gate_up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
        **_NORM,
    },
}
"""Tensors of a layer, by architecture."""
_LLAMA_BIASES = _BIASES | {"attn_output.bias": "self_attn.o_proj.bias"}
_MLP_BIASES = {f"ffn_{part}.bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}
SHOWN = 5
"""Names of tensors in an error."""


@dataclass(frozen=True, slots=True)
class Source:
    """What an array of the model is made of."""

    tensor: Tensor
    order_O: NDArray[np.intp] | None
    """Its rows in the order in which the model has them; None if that is the file's."""
    offset: float
    """What to add to its numbers."""


def find_sources(file: GgufFile) -> dict[str, Source]:
    """What each array of the model is made of, by the array's name. Raises ModelError for a tensor that is not known,
    and for one that lacks."""
    architecture = file.architecture
    kind = ARCHITECTURES[architecture]
    names = dict(_names(file))
    if unknown := sorted(file.tensors.keys() - names.keys() - ROTARY):
        raise file.error(f"{_listed(unknown)} not known in a {architecture}, so the model would be another one")
    if missing := sorted(names.keys() - file.tensors.keys()):
        raise file.error(f"{_listed(missing)} missing; copy or download it again")
    sources = {}
    for name, target in names.items():
        tensor = file.tensors[name]
        order = None
        if kind.rotates_pairs and (heads := _rotated_heads(file, name)):
            if tensor.shape[0] % (2 * heads):
                raise file.error(f"the tensor {name!r} has {tensor.shape[0]} rows, which {heads} heads cannot share")
            order = halves_order(tensor.shape[0], heads)
        offset = -1.0 if kind.norms_hold_one and name.endswith("norm.weight") else 0.0
        sources[target] = Source(tensor, order, offset)
    return sources


def write_name(target: str, architecture: str) -> str | None:
    """The name of the model's array in a file; None if the architecture has no such tensor."""
    whole = {ours: theirs for theirs, ours in WHOLE.items()}
    if target in whole:
        return whole[target]
    head, _, rest = target.removeprefix("model.layers.").partition(".")
    layer = {ours: theirs for theirs, ours in {**LAYER[architecture], **_optional(architecture)}.items()}
    return f"blk.{head}.{layer[rest]}" if target.startswith("model.layers.") and rest in layer else None


def halves_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Rows of queries or keys that rotate in neighbouring pairs, in the order in which halves of a head do: its even
    ones, then the odd ones."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def pairs_order(rows: int, heads: int) -> NDArray[np.intp]:
    """The opposite of `halves_order`."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _names(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Names of the tensors that the file should have, each with that of the model's array."""
    optional = _optional(file.architecture)
    for name, target in WHOLE.items():
        if name != "output.weight" or name in file.tensors:
            yield name, target
    for layer in range(file.integer(f"{file.architecture}.block_count")):
        for name, target in LAYER[file.architecture].items():
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{target}"
        for name, target in optional.items():
            if f"blk.0.{name}" in file.tensors:
                yield f"blk.{layer}.{name}", f"model.layers.{layer}.{target}"


def _optional(architecture: str) -> Mapping[str, str]:
    """Tensors of a layer that some models have."""
    return _LLAMA_BIASES | _MLP_BIASES if architecture == "llama" else {}


def _rotated_heads(file: GgufFile, name: str) -> int:
    """Heads whose rows the tensor holds, if it makes queries or keys; else 0."""
    heads = file.integer(f"{file.architecture}.attention.head_count")
    if ".attn_q." in name:
        return heads
    return file.integer(f"{file.architecture}.attention.head_count_kv", heads) if ".attn_k." in name else 0


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:SHOWN])
    if len(names) == 1:
        return f"the tensor {shown} is"
    return f"the tensors {shown}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''} are"
