"""Layers of the gated delta rule, of one token of each row or of packed rows: a few kernels in place of many
operations.

`patches/recurrence.py` installs what stands here, on CUDA. The layers of Qwen3.5 and Qwen3-Next get a decode step of
their own, and a pass over packed rows, which call their projections, and so LoRA, in the order of mlx-lm's code. Layers
of other models reach the kernels one by one, through mlx-lm's functions. Where a kernel does not fit, and on other
devices, mlx-lm's code runs.

Axes: B rows, T tokens of a row, M packed tokens, C channels, K width of a convolution, H heads, D head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_moe_v3, kimi_linear, olmo_hybrid, qwen3_5, qwen3_next
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from parallm.model.kernels import conv_step as conv_kernel
from parallm.model.kernels import delta_inputs as inputs_kernel
from parallm.model.kernels import gated_delta_step as delta_kernel
from parallm.model.kernels import gated_norm as norm_kernel
from parallm.model.kernels.columns import columns_of
from parallm.model.kernels.conv_step import conv_step
from parallm.model.kernels.delta_inputs import DeltaLayer, delta_inputs
from parallm.model.kernels.gated_delta_step import Gates, OutputNorm, UnitNorm, gated_delta_step
from parallm.model.kernels.gated_norm import gated_norm
from parallm.model.kernels.recurrent import has_kernels
from parallm.model.patches.forward import origin_of, set_origin
from parallm.model.recurrence.gated_delta import gated_delta
from parallm.model.recurrence.rows import PackedRows, rows_in_use
from parallm.model.recurrence.short_conv import packed_windows

UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key in both layers."""

mlx_lm_normalize_qk = mlx_lm_gated_delta.normalize_qk

Call = Callable[..., Any]
Step = tuple[mx.array, mx.array]
"""Outputs, and the state after the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """The projections of tokens, before a layer mixes them."""

    qkv_BTC: mx.array
    z_BTHD: mx.array
    b_BTH: mx.array
    a_BTH: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOrigin:
    """Origin of normalized queries and keys: what they were before."""

    q_B1HD: mx.array
    k_B1HD: mx.array
    norm: UnitNorm


def install_decode_step(base: nn.Module) -> None:
    """Let the layers of `base` compute a token of each row in kernels. Changes mlx-lm's classes; safe to repeat."""
    if not has_kernels():
        return
    for kind in {type(module) for module in base.modules()} & REPLACED.keys():
        name, replacement = REPLACED[kind]
        call = getattr(kind, name)
        if not getattr(call, "has_decode_step", False):
            replaced = wraps(call)(replacement(call))
            replaced.has_decode_step = True  # type: ignore[attr-defined]
            setattr(kind, name, replaced)


def normalize_qk(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> tuple[mx.array, mx.array]:
    """Stands in for mlx-lm's function of the same signature."""
    normed: tuple[mx.array, mx.array] = mlx_lm_normalize_qk(q, k, inv_scale=inv_scale, eps=eps)
    if q.shape[1] == 1 and has_kernels():
        origin = UnitOrigin(q_B1HD=q, k_B1HD=k, norm=unit_norm(inv_scale, eps))
        for array in normed:
            set_origin(array, origin)
    return normed


def unit_norm(inv_scale: float, eps: float) -> UnitNorm:
    """Queries of length `inv_scale`, and keys of length 1, by norms of means; `eps` is added to sums."""
    return UnitNorm(eps=eps * inv_scale**2, query_scale=inv_scale**2, key_scale=inv_scale)


def token_by_kernel(q: mx.array, k: mx.array, v: mx.array, gates: Gates, state: mx.array | None) -> Step | None:
    """`gated_delta_step` of queries and keys as `normalize_qk` gives them; None where it does not fit."""
    norm = None
    match origin_of(q), origin_of(k):
        case UnitOrigin() as of_q, UnitOrigin() as of_k if of_q is of_k:
            q, k, norm = of_q.q_B1HD, of_q.k_B1HD, of_q.norm
    if not delta_kernel.fits(q, k, v, gates, state):
        return None
    assert state is not None
    return gated_delta_step(q, k, v, gates, state, unit_norm=norm)


def with_layer_step(call: Call, projected: Callable[[Any, mx.array], Projected]) -> Call:
    """`call` (layer, inputs, mask, cache) of a gated delta layer's class with a step of its own."""

    def with_step(layer: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if (rows := rows_in_use()) is not None and getattr(layer, "sharding_group", None) is None:
            delta_layer = _delta_layer(layer)
            if inputs_kernel.fits(delta_layer, layer.conv1d.get("bias"), inputs.dtype):
                return _packed_layer(layer, delta_layer, projected(layer, inputs), rows)
        has_state = cache is not None and cache[1] is not None and cache.lengths is None
        if has_state and mask is None and inputs.shape[1] == 1 and getattr(layer, "sharding_group", None) is None:
            stepped = _layer_step(layer, projected(layer, inputs), cache)
            if stepped is not None:
                return stepped
        outputs: mx.array = call(layer, inputs, mask, cache)
        return outputs

    return with_step


def _packed_layer(layer: Any, delta_layer: DeltaLayer, given: Projected, rows: PackedRows) -> mx.array:
    """The layer's outputs (1, M, hidden) for packed rows."""
    windows = packed_windows(rows, layer.conv1d.weight.shape[1], 0)
    qkv_MC, a_MH, b_MH = (array[0, ...] for array in (given.qkv_BTC, given.a_BTH, given.b_BTH))
    outputs_MHD, _ = gated_delta(*delta_inputs(delta_layer, qkv_MC, a_MH, b_MH, windows), None, rows)
    normed_1MHD = layer.norm(outputs_MHD[None], given.z_BTHD)
    outputs: mx.array = layer.out_proj(normed_1MHD.reshape(*normed_1MHD.shape[:2], -1))
    return outputs


def _delta_layer(layer: Any) -> DeltaLayer:
    return DeltaLayer(
        conv_NK1=layer.conv1d.weight,
        A_log_H=layer.A_log,
        dt_bias_H=layer.dt_bias,
        unit_norm=unit_norm(layer.head_k_dim**-0.5, UNIT_EPS),
        key_heads=layer.num_k_heads,
        key_size=layer.head_k_dim,
        value_size=layer.head_v_dim,
    )


def _layer_step(layer: Any, given: Projected, cache: Any) -> mx.array | None:
    """The layer's outputs (B, 1, hidden) for a token; None, and an unchanged cache, where a kernel does not fit."""
    tokens = _convolved(given.qkv_BTC, layer.conv1d, cache[0])
    if tokens is None:
        return None
    convolved_B1C, tokens_BKC = tokens
    widths = [layer.key_dim, layer.key_dim, layer.value_dim]
    sizes = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    rows = convolved_B1C.shape[0]
    parts = zip(columns_of(convolved_B1C, widths), sizes, strict=True)
    q, k, v = (part.reshape(rows, 1, -1, size) for part, size in parts)
    gates = Gates(
        a=given.a_BTH,
        b=given.b_BTH,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        lower_bound=None,
        allow_neg_eigval=False,
    )
    norm = OutputNorm(weight=layer.norm.weight, gate=given.z_BTHD, eps=layer.norm.eps)
    if not delta_kernel.fits(q, k, v, gates, cache[1], norm):
        return None
    of_keys = unit_norm(layer.head_k_dim**-0.5, UNIT_EPS)
    outputs_B1HD, state = gated_delta_step(q, k, v, gates, cache[1], unit_norm=of_keys, output_norm=norm)
    cache[0], cache[1] = tokens_BKC, state
    cache.advance(1)
    outputs: mx.array = layer.out_proj(outputs_B1HD.reshape(rows, 1, -1))
    return outputs


def _projected(layer: qwen3_5.GatedDeltaNet, inputs_B1H: mx.array) -> Projected:
    qkv, z = layer.in_proj_qkv(inputs_B1H), layer.in_proj_z(inputs_B1H)
    b, a = layer.in_proj_b(inputs_B1H), layer.in_proj_a(inputs_B1H)
    heads = *z.shape[:2], layer.num_v_heads, layer.head_v_dim
    return Projected(qkv_BTC=qkv, z_BTHD=z.reshape(heads), b_BTH=b, a_BTH=a)


def _projected_by_groups(layer: qwen3_next.Qwen3NextGatedDeltaNet, inputs_B1H: mx.array) -> Projected:
    """The same of Qwen3-Next, whose projections have the columns of each key head beside each other."""
    qkvz, ba = layer.in_proj_qkvz(inputs_B1H), layer.in_proj_ba(inputs_B1H)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
    qkv = mx.concatenate([part.reshape(*qkvz.shape[:2], -1) for part in (q, k, v)], axis=-1)
    return Projected(qkv_BTC=qkv, z_BTHD=z, b_BTH=b, a_BTH=a)


def _convolved(x_B1C: mx.array, conv: nn.Conv1d, state_BKC: mx.array | None) -> Step | None:
    """silu of the convolution, and its state after the token; None where the kernel does not fit."""
    bias = conv.get("bias")
    if not conv_kernel.fits(x_B1C, state_BKC, conv.weight, bias):
        return None
    assert state_BKC is not None
    return conv_step(x_B1C, state_BKC, conv.weight, bias)


def with_kernel_norm(call: Call) -> Call:
    """`call` (norm, x, gate) of a gated norm's class."""

    def normed(norm: Any, x: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and norm_kernel.fits(x, gate, norm.weight):
            return gated_norm(x, gate, norm.weight, norm.eps)
        result: mx.array = call(norm, x, gate)
        return result

    return normed


def with_short_conv1d(call: Call) -> Call:
    """`call` of kimi_linear's convolution."""

    def convolved(layer: Any, x: mx.array, state: mx.array | None, mask: Any, lengths: Any) -> Step:
        stepped = _convolved(x, layer.conv, state) if mask is None and lengths is None else None
        result: Step = call(layer, x, state, mask, lengths) if stepped is None else stepped
        return result

    return convolved


def with_apply_conv1d(call: Call) -> Call:
    """`call` of olmo_hybrid's method of its layer."""

    def convolved(layer: Any, x: mx.array, conv: nn.Conv1d, state: Any, cache: Any, index: int) -> mx.array:
        stepped = _convolved(x, conv, state) if cache is not None else None
        if stepped is None:
            result: mx.array = call(layer, x, conv, state, cache, index)
            return result
        cache[index] = stepped[1]
        return stepped[0]

    return convolved


def with_causal_conv(call: Call) -> Call:
    """`call` of bailing_moe_v3's method of its layer."""

    def convolved(layer: Any, x: mx.array, conv: nn.Conv1d, cache: Any, index: int, mask: Any) -> mx.array:
        is_plain = cache is not None and cache.lengths is None and mask is None
        stepped = _convolved(x, conv, cache[index]) if is_plain else None
        if stepped is None:
            result: mx.array = call(layer, x, conv, cache, index, mask)
            return result
        cache[index] = stepped[1]
        return stepped[0]

    return convolved


REPLACED: Mapping[type[nn.Module], tuple[str, Callable[[Call], Call]]] = {
    qwen3_5.GatedDeltaNet: ("__call__", lambda call: with_layer_step(call, _projected)),
    qwen3_next.Qwen3NextGatedDeltaNet: ("__call__", lambda call: with_layer_step(call, _projected_by_groups)),
    qwen3_next.Qwen3NextRMSNormGated: ("__call__", with_kernel_norm),
    olmo_hybrid.RMSNormGated: ("__call__", with_kernel_norm),
    olmo_hybrid.GatedDeltaNet: ("_apply_conv1d", with_apply_conv1d),
    kimi_linear.ShortConv1d: ("__call__", with_short_conv1d),
    bailing_moe_v3.BailingKDA: ("_causal_conv", with_causal_conv),
}
"""Methods of mlx-lm's classes, and what they become."""
