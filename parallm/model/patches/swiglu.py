"""SwiGLU in place of mlx-lm's: fused kernels on CUDA, a fast exp on x86-64, the same for engine and learner."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations as mlx_lm_activations

from parallm.model.exponentials import is_slow, sigmoid
from parallm.model.kernels.cuda import VECTOR_BYTES, on_cuda
from parallm.model.kernels.swiglu import fused_swiglu
from parallm.model.patches.provenance import origin_of

_mlx_lm_swiglu = mlx_lm_activations.swiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluHalf:
    """Origin of an array (..., W): a half of what `gated` makes one array of."""

    gated: Callable[[], mx.array]
    """SwiGLU of both halves, (..., W); the same function for both."""
    index: int
    """0 or 1."""


def install_swiglu(model: nn.Module) -> None:
    """Let the modules that define `model`'s layers call `swiglu`. Changes mlx-lm's modules; safe to repeat."""
    for name in {type(module).__module__ for module in model.modules()}:
        if getattr(sys.modules[name], "swiglu", None) is _mlx_lm_swiglu:
            sys.modules[name].swiglu = swiglu  # type: ignore[attr-defined]


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x (https://arxiv.org/abs/2002.05202), of the shape and dtype of both. Halves of one product are read
    where they are."""
    match origin_of(gate), origin_of(x):
        case SwigluHalf(index=0, gated=gated), SwigluHalf(index=1, gated=other) if gated is other:
            return gated()
    if gate.shape == x.shape and is_slow(gate) and is_slow(x):
        product: mx.array = _product(gate, sigmoid(gate), x)
        return product
    fits = gate.dtype == x.dtype and gate.shape == x.shape and gate.nbytes % VECTOR_BYTES == 0
    if fits and on_cuda():
        return fused_swiglu(gate, x)
    plain: mx.array = _mlx_lm_swiglu(gate, x)
    return plain


@partial(mx.compile, shapeless=True)
def _product(gate: mx.array, sigmoid: mx.array, x: mx.array) -> mx.array:
    return gate * sigmoid * x
