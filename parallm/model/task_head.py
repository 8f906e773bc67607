"""Heads that score or classify texts: pooled hidden states -> a logit for each label.

A head comes from the files of a model for sequence classification, or from an adapter. `tasks/encoder.py` applies it.
Axes: S texts, D numbers of a pooled state, H hidden, L labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from parallm.errors import ModelError
from parallm.model.attention import product


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A layer between pooling and head: product, activation and, if there is one, layer norm."""

    weight_HD: mx.array
    bias_H: mx.array | None
    activation: str
    """`tanh` or `gelu`."""
    norm_H: mx.array | None = None
    """Weights of the norm, which has no bias."""
    eps: float = 1e-5

    def __call__(self, pooled_SD: mx.array) -> mx.array:
        hidden_SH = product(pooled_SD, self.weight_HD.T)
        hidden_SH = hidden_SH if self.bias_H is None else hidden_SH + self.bias_H
        hidden_SH = mx.tanh(hidden_SH) if self.activation == "tanh" else nn.gelu(hidden_SH)
        return hidden_SH if self.norm_H is None else mx.fast.layer_norm(hidden_SH, self.norm_H, None, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """All arrays are float32."""

    weight_LH: mx.array
    bias_L: mx.array | None = None
    dense: DenseLayer | None = None

    def logits(self, pooled_SD: mx.array) -> mx.array:
        """Logits (S, L), float32."""
        hidden_SH = pooled_SD.astype(mx.float32)
        if self.dense is not None:
            hidden_SH = self.dense(hidden_SH)
        # no matrix product: its rounding may depend on the number of texts, and a GPU's is coarser
        logits_SL = mx.stack([(hidden_SH * row_H).sum(axis=-1) for row_H in self.weight_LH], axis=1)
        return logits_SL if self.bias_L is None else logits_SL + self.bias_L


def is_of_head(name: str) -> bool:
    """Whether a tensor of a model's files belongs to a head rather than to the trunk."""
    return name.split(".")[0] in ("score", "classifier", "head") or ".pooler." in f".{name}"


def read_head(folder: Path, config: Mapping[str, object]) -> Head:
    """The head of a model for sequence classification. Raises ModelError for one of a form that is not known."""
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict), "safetensors are names and arrays"
        tensors |= {_plain(name): array.astype(mx.float32) for name, array in loaded.items() if is_of_head(name)}
    head = _head(tensors, config)
    if head is None:
        raise ModelError(f"{folder} has the tensors {sorted(tensors)[:8]} beside its trunk, no head that is known here")
    arrays = [head.weight_LH, head.bias_L, *([] if head.dense is None else [head.dense.weight_HD, head.dense.bias_H])]
    mx.eval([array for array in arrays if array is not None])
    return head


def _head(tensors: Mapping[str, mx.array], config: Mapping[str, object]) -> Head | None:
    if "score.weight" in tensors:  # of causal models
        return Head(weight_LH=tensors["score.weight"], bias_L=tensors.get("score.bias"))
    if "classifier.out_proj.weight" in tensors:  # of RoBERTa
        dense = _dense(tensors, "classifier.dense", "tanh")
        return Head(
            weight_LH=tensors["classifier.out_proj.weight"], bias_L=tensors["classifier.out_proj.bias"], dense=dense
        )
    if "classifier.weight" not in tensors:
        return None
    weight, bias = tensors["classifier.weight"], tensors.get("classifier.bias")
    if "pooler.dense.weight" in tensors:  # of BERT
        return Head(weight_LH=weight, bias_L=bias, dense=_dense(tensors, "pooler.dense", "tanh"))
    if "head.dense.weight" in tensors and config.get("classifier_activation", "gelu") == "gelu":  # of ModernBERT
        dense = _dense(tensors, "head.dense", "gelu", norm="head.norm", eps=float(str(config.get("norm_eps", 1e-5))))
        return Head(weight_LH=weight, bias_L=bias, dense=dense)
    return None


def _dense(
    tensors: Mapping[str, mx.array], name: str, activation: str, *, norm: str = "", eps: float = 1e-5
) -> DenseLayer:
    return DenseLayer(
        weight_HD=tensors[f"{name}.weight"],
        bias_H=tensors.get(f"{name}.bias"),
        activation=activation,
        norm_H=tensors.get(f"{norm}.weight"),
        eps=eps,
    )


def _plain(name: str) -> str:
    """The name of a tensor without the trunk's."""
    return name[name.index("pooler.") :] if "pooler." in name else name
