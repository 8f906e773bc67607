"""ModernBERT: an encoder with rotary positions, local attention in most layers and gated units.

https://arxiv.org/abs/2412.13663. Modules have the names of transformers' classes.
Axes: B rows, T tokens, N heads, D head size, H hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.model.attention import attention
from parallm.model.encoders.bert import ACTIVATIONS

GLOBAL, LOCAL = "full_attention", "sliding_attention"


class ModernBert(nn.Module):
    """Token ids -> hidden states. `config` is transformers' config.json; raises ValueError, KeyError for others."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeddings = ModernBertEmbeddings(config)
        kinds = layer_kinds(config)
        self.layers = [ModernBertLayer(config, index, kind) for index, kind in enumerate(kinds)]
        self.final_norm = _norm(config)
        self._reach = config.get("local_attention", 128) // 2

    def make_cache(self) -> list[Any]:
        """No layer keeps keys and values: every token sees those after it."""
        return []

    def __call__(
        self,
        tokens_BT: mx.array,
        cache: Sequence[Any] = (),
        *,
        lengths_B: mx.array | None = None,
        first_lengths_B: mx.array | None = None,
    ) -> mx.array:
        """Hidden states (B, T, H) of rows with `lengths_B` tokens (all: T). Texts of a pair have no types."""
        hidden_BTH = self.embeddings(tokens_BT)
        positions_T = mx.arange(tokens_BT.shape[1])
        distance_TT = mx.abs(positions_T[:, None] - positions_T[None])
        is_token = mx.array(True) if lengths_B is None else (positions_T < lengths_B[:, None])[:, None, None]
        # padding far from all tokens sees itself: a softmax over nothing would be NaN
        local = (is_token & (distance_TT <= self._reach)) | (distance_TT == 0)
        masks = {GLOBAL: None if lengths_B is None else is_token, LOCAL: local}
        for layer in self.layers:
            hidden_BTH = layer(hidden_BTH, masks[layer.kind])
        normed: mx.array = self.final_norm(hidden_BTH)
        return normed


class ModernBertEmbeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.norm = _norm(config)

    def __call__(self, tokens_BT: mx.array) -> mx.array:
        normed: mx.array = self.norm(self.tok_embeddings(tokens_BT))
        return normed


class ModernBertLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attn_norm = nn.Identity() if index == 0 else _norm(config)
        self.attn = ModernBertAttention(config, theta(config, kind))
        self.mlp_norm = _norm(config)
        self.mlp = ModernBertMlp(config)

    def __call__(self, hidden_BTH: mx.array, mask: mx.array | None) -> mx.array:
        hidden_BTH = hidden_BTH + self.attn(self.attn_norm(hidden_BTH), mask)
        return hidden_BTH + self.mlp(self.mlp_norm(hidden_BTH))


class ModernBertAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any], base: float) -> None:
        super().__init__()
        hidden, bias = config["hidden_size"], config.get("attention_bias", False)
        self.Wqkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.Wo = nn.Linear(hidden, hidden, bias=bias)
        self._num_heads = config["num_attention_heads"]
        self._base = base

    def __call__(self, hidden_BTH: mx.array, mask: mx.array | None) -> mx.array:
        rows, length, hidden = hidden_BTH.shape
        size = hidden // self._num_heads
        queries, keys, values = (
            part.swapaxes(1, 2)
            for part in mx.unflatten(self.Wqkv(hidden_BTH), -1, (3, self._num_heads, size)).transpose(2, 0, 1, 3, 4)
        )
        queries, keys = (
            mx.fast.rope(part, size, traditional=False, base=self._base, scale=1.0, offset=0)
            for part in (queries, keys)
        )
        attended_BNTD = attention(queries, keys, values, scale=size**-0.5, mask=mask)
        output: mx.array = self.Wo(attended_BNTD.swapaxes(1, 2).reshape(rows, length, hidden))
        return output


class ModernBertMlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner, bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.Wi = nn.Linear(hidden, 2 * inner, bias=bias)
        self.Wo = nn.Linear(inner, hidden, bias=bias)
        self._activation = ACTIVATIONS[config.get("hidden_activation", "gelu")]

    def __call__(self, hidden_BTH: mx.array) -> mx.array:
        inner, gate = mx.split(self.Wi(hidden_BTH), 2, axis=-1)
        output: mx.array = self.Wo(self._activation(inner) * gate)
        return output


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    every = config.get("global_attn_every_n_layers", 3)
    return [GLOBAL if index % every == 0 else LOCAL for index in range(config["num_hidden_layers"])]


def theta(config: Mapping[str, Any], kind: str) -> float:
    """The base of the rotary angles of a kind of layer."""
    if given := (config.get("rope_parameters") or {}).get(kind):
        if given.get("rope_type", "default") != "default":
            raise ValueError(f"the rotary positions {given['rope_type']!r} are not known here")
        return float(given["rope_theta"])
    return float(config.get("global_rope_theta", 160_000) if kind == GLOBAL else config.get("local_rope_theta", 10_000))


def _norm(config: Mapping[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False))
