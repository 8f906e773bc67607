"""Inputs of the gated delta rule from a layer's projections, as one CUDA kernel forward and two backward.

By MLX's operations it is the convolution with silu, three parts of its columns, two norms, and gates: some 20 launches
forward, and more than twice as many backward. Rounded as there: the convolution, silu, the norms, and their products
with a scale.

Axes: M tokens, N channels of queries, keys and values, H value heads, K width of the convolution, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import interned_array, kernel
from parallm.model.kernels.gated_delta_step import UnitNorm
from parallm.model.kernels.recurrent import has_kernels
from parallm.model.kernels.short_conv import MAX_WIDTH, Windows, convolution_gradient

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
LANES = 32
SIZES = (32, 64, 128, 256)  # of heads: lanes take a vector each
TOKENS = 8  # of a warp
THREADS = 256  # of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """A layer's frozen weights and sizes."""

    conv_NK1: mx.array
    A_log_H: mx.array
    dt_bias_H: mx.array
    unit_norm: UnitNorm
    key_heads: int
    key_size: int
    value_size: int

    @property
    def heads(self) -> int:
        return self.A_log_H.size


DeltaInputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""q, k, v, log a (float32) and b, of tokens and heads."""


def fits(layer: DeltaLayer, bias_N: mx.array | None, dtype: mx.Dtype) -> bool:
    """Whether `delta_inputs` can compute these of projections of type `dtype` on this device."""
    return (
        has_kernels()
        and bias_N is None
        and dtype in DTYPES
        and layer.conv_NK1.dtype == dtype
        and layer.conv_NK1.shape[1] <= MAX_WIDTH
        and all(array.dtype in (mx.float32, dtype) for array in (layer.A_log_H, layer.dt_bias_H))
        and layer.key_size in SIZES
        and layer.value_size in SIZES
    )


def delta_inputs(layer: DeltaLayer, x_MN: mx.array, a_MH: mx.array, b_MH: mx.array, windows: Windows) -> DeltaInputs:
    """Queries, keys and values after the convolution of `x_MN`, and gates; differentiable by all but the layer."""
    scales = interned_array((layer.unit_norm.eps, layer.unit_norm.query_scale, layer.unit_norm.key_scale), mx.float32)
    weights = [layer.A_log_H, layer.dt_bias_H, scales]

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, ...]:
        of_keys = len(x), layer.key_heads, layer.key_size
        shapes = [of_keys, of_keys, (len(x), layer.heads, layer.value_size), a.shape, a.shape]
        dtypes = [x.dtype] * 3 + [mx.float32, x.dtype]
        arrays = [x, layer.conv_NK1, windows.sources, a, b, *weights]
        return tuple(_run("delta_inputs", layer, arrays, shapes, dtypes))

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: object) -> tuple[mx.array, ...]:
        x, a, b = primals
        of_convolved, of_a, of_b = _run(
            "delta_inputs_gradient",
            layer,
            [x, layer.conv_NK1, windows.sources, a, b, *weights, *cotangents],
            [x.shape, a.shape, b.shape],
            [x.dtype] * 3,
        )
        return convolution_gradient(of_convolved, layer.conv_NK1, windows), of_a, of_b

    given: DeltaInputs = forward(x_MN, a_MH, b_MH)
    return given


def _run(
    name: str,
    layer: DeltaLayer,
    inputs: list[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    tokens, units = len(inputs[0]), 2 * layer.key_heads + layer.heads + 1
    defines: Defines = (
        ("T", inputs[0].dtype),
        ("RATE", layer.A_log_H.dtype),
        ("SHIFT", layer.dt_bias_H.dtype),
        ("KEY_HEADS", layer.key_heads),
        ("HEADS", layer.heads),
        ("DK", layer.key_size),
        ("DV", layer.value_size),
        ("K", layer.conv_NK1.shape[1]),
        ("TOKENS", TOKENS),
    )
    threads = -(-tokens // TOKENS) * units * LANES
    return kernel(name, defines)(
        inputs,
        [tokens],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
