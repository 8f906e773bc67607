"""Metadata of a GGUF file -> config.json of the Hugging Face model that it was made from. Imports no MLX.

The architectures and their keys: https://github.com/ggml-org/llama.cpp, `conversion/` and `gguf-py/gguf/constants.py`.
A key of the architecture that is not known here is refused, because it may change what the model computes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallm.model.gguf.file import GgufFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What differs between the architectures."""

    model_type: str
    """The name in mlx-lm."""
    hf_class: str
    rotates_pairs: bool = False
    """Whether rows of queries and keys are stored so that neighbours rotate together, where we rotate halves."""
    norms_hold_one: bool = False
    """Whether norms are stored with the 1 that the model adds."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", hf_class="LlamaForCausalLM", rotates_pairs=True),
    "qwen2": Architecture(model_type="qwen2", hf_class="Qwen2ForCausalLM"),
    "qwen3": Architecture(model_type="qwen3", hf_class="Qwen3ForCausalLM"),
    "gemma2": Architecture(model_type="gemma2", hf_class="Gemma2ForCausalLM", norms_hold_one=True),
    "gemma3": Architecture(model_type="gemma3_text", hf_class="Gemma3ForCausalLM", norms_hold_one=True),
    "phi3": Architecture(model_type="phi3", hf_class="Phi3ForCausalLM"),
}
"""The architectures by `general.architecture`. Files of Mistral's models call theirs llama."""
MODEL_TYPES: Mapping[str, str] = {
    **{kind.model_type: name for name, kind in ARCHITECTURES.items()},
    "mistral": "llama",
}
"""Architectures by model types of config.json."""
COMMON_KEYS = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "pooling_type"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal", "expert_count"),
        *("expert_used_count", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor"),
        "tensor_data_layout",
    }
)
OWN_KEYS: Mapping[str, frozenset[str]] = {
    "gemma2": frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    "gemma3": frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
}
"""Keys of one architecture alone."""
DEFAULT_ROPE = 10_000.0
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""How Llama 3.1 to 3.3 scale their rotary positions; a file holds what follows from these and a factor."""
SCALED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), ("linear", "yarn")),
    "gemma3": ("linear",),
}
"""Ways to scale rotary positions that mlx-lm's classes know, beside those of single architectures."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B, whose queries are scaled by another number than the length of a head."""
GEMMA3_PATTERN = 6
CLOSE = 1e-4
"""Relative difference that two ways to compute rotary factors in float32 may have."""
POOLING = {0: None, 1: "mean", 2: "cls", 3: "lasttoken"}


def find_architecture(file: GgufFile) -> Architecture:
    """The architecture of a whole model. Raises ModelError for others, and for unknown keys."""
    name, kind = file.architecture, file.text("general.type", "model")
    if kind != "model":
        raise file.error(f"it is no model but of the type {kind[:100]!r}; name the file of the model itself")
    if name not in ARCHITECTURES:
        raise file.error(f"its architecture {name[:100]!r} is not known here; known are {', '.join(ARCHITECTURES)}")
    known = COMMON_KEYS | OWN_KEYS.get(name, frozenset())
    own = [key.removeprefix(f"{name}.") for key in file.metadata if key.startswith(f"{name}.")]
    if unknown := sorted(key for key in own if key not in known):
        raise file.error(f"{name}.{unknown[0][:100]} is not known here, and may change what the model computes")
    for key, usual in (("expert_count", 0), ("attention.causal", True)):
        if (value := file.metadata.get(f"{name}.{key}", usual)) != usual:
            raise file.error(f"{name}.{key} is {str(value)[:100]}, and only {usual} is known here")
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of a file's model. Raises ModelError for what is missing, contradicts itself or is not known."""
    kind, shape = find_architecture(file), _Shape(file)
    config: dict[str, Any] = {
        "architectures": [kind.hf_class],
        "model_type": kind.model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.integer("context_length"),
        "rms_norm_eps": file.number(shape.key("attention.layer_norm_rms_epsilon")),
        "rope_theta": file.number(shape.key("rope.freq_base"), DEFAULT_ROPE),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_tokens(file, shape.vocabulary),
    }
    own = {"llama": _llama, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3}.get(file.architecture)
    config |= _scaling(file, shape) | (own(file, shape, config) if own else {})
    if not _is_dense(file):
        config["dtype"] = "bfloat16"  # of what is computed with packed weights: their scales are float32 to be exact
    return config


class _Shape:
    """Sizes of the model, in which metadata and tensors agree; they bound what is made for it."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.layers = self.integer("block_count")
        self.hidden = self.integer("embedding_length")
        self.inner = self.integer("feed_forward_length")
        self.heads = self.integer("attention.head_count")
        self.kv_heads = self.integer("attention.head_count_kv", self.heads)
        self.vocabulary = self._of_tensor("token_embd.weight", 0)
        rotated = self.integer("rope.dimension_count", self.hidden // self.heads or 1)
        has_partial = file.architecture == "phi3"
        self.head = self.integer("attention.key_length", self.hidden // self.heads if has_partial else rotated)
        self.rotated = self.integer("rope.dimension_count", self.head)
        named = {int(name.split(".")[1]) for name in file.tensors if _is_of_layer(name)}
        if len(named) != self.layers or max(named) != self.layers - 1:
            raise file.error(f"{self.key('block_count')} is {self.layers}, and it has tensors of {len(named)} layers")
        self._check("embedding_length", self.hidden, "token_embd.weight", 1)
        self._check("feed_forward_length", self.inner, "blk.0.ffn_down.weight", 1)
        self._check("attention.head_count", self.heads * self.head, "blk.0.attn_output.weight", 1)
        if self.heads % self.kv_heads or self.head % 2:
            raise file.error(f"{self.heads} heads of {self.head} numbers cannot share {self.kv_heads} of keys")
        if self.integer("attention.value_length", self.head) != self.head:
            raise file.error(f"{self.key('attention.value_length')} differs from the length of keys, {self.head}")
        if self.rotated % 2 or self.rotated > self.head or (self.rotated < self.head and not has_partial):
            raise file.error(f"{self.key('rope.dimension_count')} is {self.rotated} of {self.head}, which is not known")

    def key(self, name: str) -> str:
        return f"{self._file.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self._file.integer(self.key(name), default)

    def _of_tensor(self, name: str, axis: int) -> int:
        tensor = self._file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise self._file.error(f"it has no matrix {name}; the file is damaged, or no language model")
        return tensor.shape[axis]

    def _check(self, name: str, value: int, tensor: str, axis: int) -> None:
        if (found := self._of_tensor(tensor, axis)) != value:
            raise self._file.error(f"{self.key(name)} asks for {value} columns of {tensor}, which has {found}")


def _is_of_layer(name: str) -> bool:
    head, _, rest = name.partition(".")
    return head == "blk" and rest.partition(".")[0].isdecimal()


def _is_dense(file: GgufFile) -> bool:
    return all(tensor.kind.elements == 1 for tensor in file.tensors.values())


def _tokens(file: GgufFile, vocabulary: int) -> dict[str, Any]:
    """Ids of special tokens by their names in config.json."""
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in file.metadata:
            found[name] = file.integer(f"tokenizer.ggml.{key}", least=0)
            if found[name] >= vocabulary:
                raise file.error(f"tokenizer.ggml.{key} is {found[name]}, and the model has {vocabulary} tokens")
    return found


def _scaling(file: GgufFile, shape: _Shape) -> dict[str, Any]:
    """How rotary positions are scaled."""
    kind = file.text(shape.key("rope.scaling.type"), "linear")
    factor = file.number(shape.key("rope.scaling.factor"), 1.0)
    if kind in ("none", "longrope") or (kind == "linear" and factor == 1):
        return {}
    if kind not in SCALED.get(file.architecture, ()):
        raise file.error(f"{shape.key('rope.scaling.type')} is {kind[:100]!r}, which is not known here")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": factor}}
    context = shape.integer("rope.scaling.original_context_length")
    named = {"rope_type": "yarn", "type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    return {"rope_scaling": named}


def _llama(file: GgufFile, shape: _Shape, config: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = "blk.0.attn_q.bias" in file.tensors
    own: dict[str, Any] = {"attention_bias": has_bias, "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}
    if (tensor := file.tensors.get("rope_freqs.weight")) is None:
        return own
    if tensor.kind.name != "F32" or tensor.shape != (shape.rotated // 2,):
        raise file.error("rope_freqs.weight should hold a float32 factor for each pair of rotated numbers")
    found = tensor.data.view("<f4")
    factor = round(float(found.max()), 4)
    if not np.allclose(found, llama3_factors(shape.rotated, config["rope_theta"], factor), rtol=CLOSE):
        raise file.error("rope_freqs.weight holds other rotary factors than those of Llama 3, which are not known here")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
    return own | {"rope_scaling": scaling}


def llama3_factors(rotated: int, theta: float, factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What Llama 3 divides the frequency of each pair of numbers by: the slow ones by `factor`."""
    frequencies = 1.0 / theta ** (np.arange(0, rotated, 2) / rotated)
    turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    share = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _gemma2(file: GgufFile, shape: _Shape, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": query_scale(file.architecture, shape.layers, shape.hidden, shape.heads, shape.head),
        "attn_logit_softcapping": file.number(shape.key("attn_logit_softcapping"), 50.0),
        "final_logit_softcapping": file.number(shape.key("final_logit_softcapping"), 30.0),
        "sliding_window": shape.integer("attention.sliding_window", 4096),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(file: GgufFile, shape: _Shape, _: Mapping[str, Any]) -> dict[str, Any]:
    is_sliding = shape.key("attention.sliding_window") in file.metadata
    return {
        "query_pre_attn_scalar": query_scale(file.architecture, shape.layers, shape.hidden, shape.heads, shape.head),
        "rope_theta": file.number(shape.key("rope.freq_base"), 1_000_000.0),
        "rope_local_base_freq": file.number(shape.key("rope.freq_base_swa"), DEFAULT_ROPE),
        "sliding_window": shape.integer("attention.sliding_window", shape.integer("context_length")),
        "sliding_window_pattern": shape.integer(
            "attention.sliding_window_pattern", GEMMA3_PATTERN if is_sliding else 1
        ),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def query_scale(architecture: str, layers: int, hidden: int, heads: int, head: int) -> int:
    """`query_pre_attn_scalar` of a Gemma, which no key says: llama.cpp tells the models of 27B by their layers."""
    return hidden // heads if layers == LARGEST[architecture] else head


def _phi3(file: GgufFile, shape: _Shape, config: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"partial_rotary_factor": shape.rotated / shape.head}
    trained = shape.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    own["original_max_position_embeddings"] = trained
    if window := file.integer(shape.key("attention.sliding_window"), 0, least=0):
        own["sliding_window"] = window
    names = [f"rope_factors_{length}.weight" for length in ("long", "short")]
    tensors = [file.tensors[name] for name in names if name in file.tensors]
    if not tensors:
        return own
    if len(tensors) < 2 or any(one.kind.name != "F32" or one.shape != (shape.rotated // 2,) for one in tensors):
        raise file.error(f"{' and '.join(names)} should hold a float32 factor for each pair of rotated numbers")
    long, short = ([float(value) for value in tensor.data.view("<f4")] for tensor in tensors)
    if not all(0 < value < math.inf for value in (*long, *short)):
        raise file.error(f"{' and '.join(names)} should hold positive numbers")
    return own | {
        "rope_scaling": {"type": "longrope", "rope_type": "longrope", "long_factor": long, "short_factor": short}
    }
