"""Whether a base that is stored in bfloat16 computes in float16, on CUDA.

Engine and learner compute the same forward in other shapes, so sums differ in their last bits, and a rounding here or
there falls to the other side. After a few layers that is as much as if each had rounded at random, whatever small
difference began it: only bits that are all equal would help, or finer numbers. float16 has eight times finer ones at
the same speed, and its log-probs agree fifty times better (k3; https://arxiv.org/abs/2510.26788). Its range ends at
65,504 though, so a trial forward decides.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from parallm.model.kernels.cuda import on_cuda
from parallm.model.layers import replaced_layers
from parallm.model.quantized import stored_dtype
from parallm.model.shared_model import SharedModel, can_batch

MARGIN = 16.0
"""What float16 holds over the largest hidden state of the trial: other tokens and adapters reach further."""
TRIAL_TOKENS = 64
KEPT = (nn.QuantizedLinear, nn.QuantizedEmbedding, SwitchLinear, QuantizedSwitchLinear)
"""Layers whose bases stay as they are stored; experts have not been measured in float16."""


def may_be_float16(base: nn.Module, model_type: str) -> bool:
    """Whether `base` is worth a trial: stored in bfloat16, without quantized layers, experts, and states (they would be
    rounded from token to token), its layers in a list. Evaluates nothing."""
    layers = getattr(getattr(base, "model", None), "layers", None)
    is_plain = isinstance(layers, list) and not any(isinstance(module, KEPT) for module in base.modules())
    return on_cuda() and is_plain and stored_dtype(base) == mx.bfloat16 and can_batch(base, model_type)


def is_in_range(model: SharedModel) -> bool:
    """Whether hidden states of tokens from all over the vocabulary stay far inside of float16's range.

    The first token of any text has the largest ones (https://arxiv.org/abs/2402.17762).
    """
    if model.trunk_owner is None:
        return False
    largest: list[mx.array] = []
    with replaced_layers(model, [_Watched(layer, largest) for layer in model.trunk.layers]):
        step = max(1, model.vocabulary_size // TRIAL_TOKENS)
        tokens_1T = mx.arange(0, model.vocabulary_size, step)[None]
        hidden_1TH = model.hidden(tokens_1T, model.make_cache(), None)
        logits_TV = model.head(mx.squeeze(hidden_1TH, 0))
    limit = float(mx.finfo(mx.float16).max) / MARGIN
    return bool((mx.isfinite(logits_TV).all() & (mx.stack(largest).max() <= limit)).item())


@dataclass(frozen=True, slots=True)
class _Watched:
    """Stands in for a layer; notes the largest number of its results."""

    layer: nn.Module
    largest: list[mx.array]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self.layer(*arguments, **options)
        hidden = result[0] if isinstance(result, tuple) else result
        self.largest.append(mx.abs(hidden).max().astype(mx.float32))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)
