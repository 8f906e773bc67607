"""The RMS norm of heads times a weight and silu of a gate, as one CUDA kernel forward and one backward.

mlx-lm computes all but the norm in a function that MLX compiles, which takes 3.5 s of a first request on a GPU. Rounded
as there: the norm before its weight, the product with it, and the result.

Axes: N heads of any tokens, D head size.
"""

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, kernel
from parallm.model.kernels.recurrent import has_kernels

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_SIZE = 1024
THREADS = 128  # of a block: four heads


def fits(x: mx.array, gate: mx.array, weight_D: mx.array) -> bool:
    """Whether `gated_norm` can compute these on this device."""
    return (
        has_kernels()
        and x.shape == gate.shape
        and x.shape[-1:] == weight_D.shape
        and x.dtype == gate.dtype == weight_D.dtype
        and x.dtype in DTYPES
        and weight_D.nbytes % VECTOR_BYTES == 0
        and weight_D.size <= MAX_SIZE
    )


def gated_norm(x: mx.array, gate: mx.array, weight_D: mx.array, eps: float) -> mx.array:
    """RMS norm of heads (.., D), times a weight and silu of the gate (.., D), in their type; differentiable."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x: mx.array, gate: mx.array, weight_D: mx.array) -> mx.array:
        return _run("gated_norm", [x, gate, weight_D], eps, num_outputs=1)[0]

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        x, gate, weight_D = primals
        # of a frozen weight the gradient is never computed
        _, of_weight = mx.vjp(lambda weight_D: plain_gated_norm(x, gate, weight_D, eps), [weight_D], [cotangent])
        return [*_run("gated_norm_gradient", [x, gate, weight_D, cotangent], eps, num_outputs=2), *of_weight]

    normed: mx.array = forward(x, gate, weight_D)
    return normed


def plain_gated_norm(x: mx.array, gate: mx.array, weight_D: mx.array, eps: float) -> mx.array:
    """The same by MLX's operations."""
    wide = gate.astype(mx.float32)
    normed = mx.fast.rms_norm(x, weight_D, eps).astype(mx.float32)
    return (wide * mx.sigmoid(wide) * normed).astype(x.dtype)


def _run(name: str, inputs: list[mx.array], eps: float, *, num_outputs: int) -> list[mx.array]:
    x = inputs[0]
    heads = x.size // x.shape[-1]
    return kernel(name, (("T", x.dtype), ("SIZE", x.shape[-1])))(
        inputs,
        [heads, float(eps)],
        grid=(-(-heads * 32 // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x.shape] * num_outputs,
        output_dtypes=[x.dtype] * num_outputs,
    )
