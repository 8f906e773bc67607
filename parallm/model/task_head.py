"""Layers behind pooling: heads that score or classify texts, and the dense modules of models that make vectors.

A head comes from the files of a model for sequence classification, or from an adapter. `tasks/encoder.py` applies it.
Axes: S texts, D numbers of a pooled state, H hidden, L labels.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from parallm.errors import ModelError
from parallm.model.attention import product

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "tanh": mx.tanh,
    "gelu": nn.gelu,
    "relu": nn.relu,
    "identity": lambda hidden_SH: hidden_SH,
}
"""Activations, by the small letters of PyTorch's classes."""
DENSE_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A layer after pooling: product, activation and, if there is one, layer norm."""

    weight_HD: mx.array
    bias_H: mx.array | None
    activation: str
    """A name of `ACTIVATIONS`."""
    norm_H: mx.array | None = None
    """Weights of the norm, which has no bias."""
    eps: float = 1e-5

    def __call__(self, pooled_SD: mx.array) -> mx.array:
        hidden_SH = product(pooled_SD, self.weight_HD.T)
        hidden_SH = hidden_SH if self.bias_H is None else hidden_SH + self.bias_H
        hidden_SH = ACTIVATIONS[self.activation](hidden_SH)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The dense modules that a pooled vector goes through. All arrays are float32."""

    layers: tuple[DenseLayer, ...]

    @property
    def size(self) -> int:
        """Numbers of a vector behind the last one."""
        return int(self.layers[-1].weight_HD.shape[0])

    def __call__(self, pooled_SD: mx.array) -> mx.array:
        for layer in self.layers:
            pooled_SD = layer(pooled_SD.astype(mx.float32))
        return pooled_SD


def read_projection(folder: Path, paths: Sequence[str], size: int) -> Projection:
    """The dense modules in folders below a model's, for vectors of `size` numbers. Raises ModelError."""
    layers: list[DenseLayer] = []
    for path in paths:
        layer = _read_dense(folder / path)
        if layer.weight_HD.shape[1] != size:
            raise ModelError(f"{path} takes {layer.weight_HD.shape[1]} numbers, and gets {size}")
        size = layer.weight_HD.shape[0]
        layers.append(layer)
    projection = Projection(layers=tuple(layers))
    mx.eval([array for layer in layers for array in (layer.weight_HD, layer.bias_H) if array is not None])
    return projection


def _read_dense(folder: Path) -> DenseLayer:
    """A module of the class Dense of sentence-transformers. Raises ModelError."""
    file = folder / DENSE_WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder.name} has no {DENSE_WEIGHTS}; save the model anew, other forms are not read")
    try:
        config, arrays = json.loads((folder / "config.json").read_text()), mx.load(str(file))
        activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2].lower()
        names = {config.get(f"module_{end}_name") for end in ("input", "output")} - {None, "sentence_embedding"}
        if activation not in ACTIVATIONS or names or not isinstance(arrays, dict):
            raise ModelError(
                f"{folder.name} has the activation {activation[:100]} or reads {sorted(map(str, names))}; known are "
                f"{', '.join(ACTIVATIONS)} of sentence_embedding"
            )
        weight_HD, bias_H = arrays["linear.weight"], arrays.get("linear.bias")
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder.name} cannot be read: {error}") from error
    is_whole = weight_HD.ndim == 2 and (bias_H is None or bias_H.shape == weight_HD.shape[:1])
    if not is_whole or set(arrays) - {"linear.weight", "linear.bias"}:
        raise ModelError(f"{folder.name} has the tensors {sorted(arrays)[:8]}, no layer of the class Dense")
    return DenseLayer(
        weight_HD=weight_HD.astype(mx.float32),
        bias_H=None if bias_H is None else bias_H.astype(mx.float32),
        activation=activation,
    )


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
