"""Replacements in a forward of mlx-lm's models: embeddings, attention, SwiGLU, residual adds, the trunk while the head
runs.

mlx-lm's models call one operation after the other. Where a later operation is ours and has a kernel for both, it asks
for the origin of its input (`origin_of`) and starts from that. MLX is lazy: the input itself is never computed. For the
device thread, or a thread that builds a graph while it waits.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations as mlx_lm_activations
from mlx_lm.models import base as mlx_lm_base

from parallm.model.attention import attention
from parallm.model.kernels import head_norm, rms_norm, unpack
from parallm.model.kernels.add_norm import add_norm, can_shrink, fits
from parallm.model.kernels.columns import flat_rows
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels
from parallm.model.kernels.gather import take_rows
from parallm.model.kernels.segmented_lora import GroupWeights, ShrinkOutput
from parallm.model.kernels.small_batch_gemm import ShrunkRows
from parallm.model.kernels.swiglu import fused_swiglu
from parallm.model.logprobs import is_slow, sigmoid
from parallm.model.quantized import UnpackingEmbedding

AddNorm = Callable[[mx.array, mx.array, mx.array, float], Sequence[mx.array]]
"""Adds parts (S, B, T, H) to the stream, and norms it with a weight and its eps; returns the stream and its norm in the
weight's type."""
TRUNK_NAMES = ("model", "transformer", "backbone")

_mlx_lm_attention = mlx_lm_base.scaled_dot_product_attention
_mlx_lm_swiglu = mlx_lm_activations.swiglu
_mlx_lm_precise_swiglu = mlx_lm_activations.precise_swiglu
_origins: dict[int, tuple[weakref.ref[mx.array], object]] = {}


class OwnCache:
    """Marks the caches whose attention is computed here."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """A layer's attention with this cache; `mask` comes from the cache's own `make_mask`."""
        return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def install_forward(model: nn.Module, is_served: Callable[[], bool], is_trained: Callable[[], bool]) -> None:
    """Let the modules that define `model`'s layers call our functions; `is_served` and `is_trained`: see `FusedNorm`.
    Changes mlx-lm's modules; safe to repeat."""
    replaced = {
        "scaled_dot_product_attention": (_mlx_lm_attention, _dispatch),
        "swiglu": (_mlx_lm_swiglu, swiglu),
        "precise_swiglu": (_mlx_lm_precise_swiglu, precise_swiglu),
    }
    for module in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, (original, replacement) in replaced.items():
            if getattr(module, name, None) is original:
                setattr(module, name, replacement)
    if has_kernels():
        fuse_norms(model)
        for layer in model.modules():
            if isinstance(layer, FusedNorm):
                layer.is_served, layer.is_trained = is_served, is_trained
            if type(layer) in EMBEDDINGS:
                layer.__class__ = EMBEDDINGS[type(layer)]


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model` ask for the origin of the stream; safe to repeat."""
    for layer in model.modules():
        if type(layer) is nn.RMSNorm:
            layer.__class__ = FusedNorm


class RowEmbedding(nn.Embedding):
    """An embedding that takes its rows with our kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        return take_rows(self.weight, x)


class QuantizedRowEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding that does so."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = {name: take_rows(self[name], x) for name in ("weight", "scales", "biases") if self.get(name) is not None}
        if unpack.fits(self, self.scales.dtype):
            packed, *groups = (flat_rows(rows[name]) for name in ("weight", "scales", "biases"))
            unpacked = unpack.unpack_weights(packed, *groups, group_size=self.group_size, bits=self.bits)
            return unpacked.reshape(*x.shape, -1)
        return mx.dequantize(
            rows["weight"],
            scales=rows["scales"],
            biases=rows.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


class UnpackingRowEmbedding(QuantizedRowEmbedding, UnpackingEmbedding):
    """One that unpacks its weights where it is the head, too."""


EMBEDDINGS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: RowEmbedding,
    nn.QuantizedEmbedding: QuantizedRowEmbedding,
    UnpackingEmbedding: UnpackingRowEmbedding,
}


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands in for mlx-lm's function of the same signature."""
    if isinstance(cache, OwnCache):
        return cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    result: mx.array = _mlx_lm_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluHalf:
    """Origin of an array (..., W): a half of what `gated` makes one array of."""

    gated: Callable[[], mx.array]
    """SwiGLU of both halves, (..., W); the same function for both."""
    index: int
    """0 or 1."""


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
    if fits and has_kernels():
        return fused_swiglu(gate, x)
    plain: mx.array = _mlx_lm_swiglu(gate, x)
    return plain


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x in float32, of the type of h."""
    if gate.shape == x.shape and is_slow(gate) and is_slow(x):
        product: mx.array = _product(gate, sigmoid(gate), x)
        return product.astype(h.dtype)
    plain: mx.array = _mlx_lm_precise_swiglu(h, gate, x)
    return plain


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x), in the type of x; stands in for `nn.silu` outside of what MLX compiles for any shape."""
    result: mx.array = x * sigmoid(x) if is_slow(x) else nn.silu(x)
    return result


@partial(mx.compile, shapeless=True)
def _product(gate: mx.array, sigmoid: mx.array, x: mx.array) -> mx.array:
    return gate * sigmoid * x


def set_origin(array: mx.array, origin: object) -> None:
    """Keep `origin` as long as `array` exists."""
    key = id(array)
    _origins[key] = (weakref.ref(array, lambda _: _origins.pop(key, None)), origin)


def origin_of(array: mx.array) -> object | None:
    entry = _origins.get(id(array))
    return entry[1] if entry is not None and entry[0]() is array else None


@dataclass(slots=True, kw_only=True)
class ResidualSum:
    """Origin of the residual stream after a sublayer: the parts of the sublayer's output and the stream before it."""

    parts_SBTH: mx.array | None
    """None: the stream before is all of it."""
    before_BTH: mx.array
    kernel: AddNorm | None
    """Adds and norms; None: `add_norm`."""
    lora: ShrinkOutput | None
    """LoRA of the sublayer's output that is still to be added, by `add_norm`."""
    value_BTH: mx.array | None = None
    """The stream from the kernel of its norm, once that was asked for: whoever adds to the stream reads this one."""

    def normed(self, weight_H: mx.array, eps: float) -> mx.array:
        """RMSNorm of the stream, (B, T, H)."""
        parts_SBTH, before_BTH = self.parts_SBTH, self.before_BTH
        if self.kernel is not None and parts_SBTH is not None:
            self.value_BTH, normed_BTH = self.kernel(parts_SBTH, before_BTH, weight_H, eps)
        else:
            self.value_BTH, normed_BTH = add_norm(parts_SBTH, before_BTH, weight_H, eps, lora=self.lora)
        set_origin(normed_BTH, NormedSum(total=self, weight_H=weight_H, eps=eps))
        return normed_BTH


def whole_stream(stream_BTH: mx.array) -> ResidualSum:
    """The origin of a stream to which nothing was added yet."""
    return ResidualSum(parts_SBTH=None, before_BTH=stream_BTH, kernel=None, lora=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSum:
    """Origin of the norm of a residual stream."""

    total: ResidualSum
    weight_H: mx.array
    eps: float

    def shrunk(self, weights: GroupWeights, order_B2: mx.array) -> tuple[mx.array, ShrunkRows] | None:
        """The norm, and its products with A of the targets that read it, by the kernel of the norm; None where that
        cannot. It takes the place of the norm that was made before."""
        total = self.total
        if total.kernel is not None or not can_shrink(total.before_BTH, total.lora, weights):
            return None
        total.value_BTH, normed_BTH, shrunk_BK = add_norm(
            total.parts_SBTH,
            total.before_BTH,
            self.weight_H,
            self.eps,
            lora=total.lora,
            following=(weights, order_B2),
        )
        return normed_BTH, ShrunkRows(weights=weights, shrunk_BK=shrunk_BK)


class FusedNorm(nn.RMSNorm):
    """An RMSNorm that may be one kernel with a residual add and with what comes after it, and whose gradient leaves out
    that of its frozen weight."""

    is_served: Callable[[], bool] = staticmethod(lambda: False)
    """Whether kernels without gradients may compute what runs now."""
    is_trained: Callable[[], bool] = staticmethod(lambda: False)
    """Whether what runs now is differentiated, by LoRA alone."""

    def __call__(self, x: mx.array) -> mx.array:
        match origin_of(x):
            case ResidualSum() as origin if self.weight.dtype == x.dtype:
                return origin.normed(self.weight, self.eps)
            case None if self.weight.dtype == x.dtype and self.is_served():
                if fits(None, x):
                    return whole_stream(x).normed(self.weight, self.eps)
                if head_norm.fits(x, self.weight):
                    return head_norm.head_norm(x, self.weight, self.eps)
            case None if self.is_trained() and rms_norm.fits(x, self.weight):
                return rms_norm.rms_norm(x, self.weight, self.eps)
        normed: mx.array = super().__call__(x)
        return normed


class FusedAdd(mx.array):
    """`value`, until another array of its shape and type is added to it: then `added_to` of that array.

    mlx-lm's layers end with `x + self.mlp(...)`, and one kernel does both: Python asks the operand of the derived class
    first. With `parts` (S, B, T, H), whose sum and `lora` make `value`, the norm after that add can be part of the
    kernel, too. With `kernel` it is that one, `value` is the sum over other processes as well, and the stream may be of
    a wider type.
    """

    def __init__(
        self,
        value: mx.array,
        added_to: Callable[[mx.array], mx.array],
        parts: mx.array | None = None,
        kernel: AddNorm | None = None,
        lora: ShrinkOutput | None = None,
    ) -> None:
        super().__init__(value)
        self.value = value
        self._added_to = added_to
        self.parts = parts
        self._kernel = kernel
        self.lora = lora

    def __radd__(self, other: Any) -> mx.array:
        if isinstance(other, mx.array) and other.shape == self.shape and other.dtype == self.dtype:
            match origin_of(other):
                case ResidualSum(value_BTH=mx.array() as value) if (
                    self._kernel is not None or value.dtype == self.dtype
                ):
                    other = value
            total = self._added_to(other)
            parts, kernel = self.parts, self._kernel
            if parts is not None and (kernel or fits(parts, other, self.lora)):
                set_origin(total, ResidualSum(parts_SBTH=parts, before_BTH=other, kernel=kernel, lora=self.lora))
            return total
        return super().__radd__(other)

    def __add__(self, other: Any) -> mx.array:
        return self.__radd__(other)


def find_trunk(base: nn.Module) -> tuple[nn.Module | None, str]:
    """The module that owns the trunk (tokens -> hidden states), and the trunk's name in it; None where there is none.

    mlx-lm's models call `self.model(inputs, cache)` (or transformer, backbone; multimodal ones under language_model),
    then the head. Whether the split reproduces the whole forward to the bit is checked when a model is loaded.
    """
    owner = getattr(base, "language_model", base)
    for name in TRUNK_NAMES:
        if isinstance(getattr(owner, name, None), nn.Module):
            return owner, name
    return None, ""


class Replay:
    """Stands in for the trunk while the head runs: gives hidden states that are already known."""

    def __init__(self, trunk: nn.Module, hidden_BTH: mx.array) -> None:
        self._trunk = trunk
        self._hidden_BTH = hidden_BTH

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._hidden_BTH

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)
