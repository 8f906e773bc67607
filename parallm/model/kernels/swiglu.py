"""SwiGLU as one CUDA kernel forward and one backward; `patches/forward.py` chooses it.

Inside a gradient MLX does not fuse operations: mlx-lm's `swiglu` runs as three kernels forward and ten backward, and
keeps what lies between them, 1.0 ms for 4,096 tokens of 14,336 on an H200; these kernels take 0.2 ms. Arithmetic is
float32, rounded once.
"""

import math

import mlx.core as mx

from parallm.model.kernels.columns import shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, kernel

THREADS = 256  # of a block


def fused_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x of arrays of one shape and type, of whole vectors."""
    product_N: mx.array = _of_two(gate.reshape(-1), x.reshape(-1))
    return product_N.reshape(gate.shape)


def swiglu_of_halves(joined: mx.array, *, has_gradient: bool = True) -> mx.array:
    """SwiGLU (..., W) of the first and second half of an array (..., 2 W), whose halves are whole vectors. A function
    with a gradient is four more nodes of the graph, which a step's host walks."""
    if not has_gradient:
        width = joined.shape[-1]
        (product_NW,) = _run("swiglu", [joined], [(joined.size // width, width // 2)], halves=True)
        return shaped(product_NW, (*joined.shape[:-1], width // 2))
    product_NW = _of_halves(joined.reshape(-1, joined.shape[-1]))
    return product_NW.reshape(*joined.shape[:-1], -1)


@mx.custom_function  # type: ignore[untyped-decorator]
def _of_two(gate: mx.array, x: mx.array) -> mx.array:
    return _run("swiglu", [gate, x], [gate.shape])[0]


@_of_two.vjp  # type: ignore[untyped-decorator]
def _of_two_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> list[mx.array]:
    gate, x = primals
    return _run("swiglu_gradient", [gate, x, cotangent], [gate.shape] * 2)


@mx.custom_function  # type: ignore[untyped-decorator]
def _of_halves(joined: mx.array) -> mx.array:
    return _run("swiglu", [joined], [(joined.shape[0], joined.shape[1] // 2)], halves=True)[0]


@_of_halves.vjp  # type: ignore[untyped-decorator]
def _of_halves_vjp(joined: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
    return _run("swiglu_gradient", [joined, cotangent], [joined.shape], halves=True)[0]


def _run(name: str, inputs: list[mx.array], shapes: list[tuple[int, ...]], *, halves: bool = False) -> list[mx.array]:
    """Outputs of these shapes. Each thread takes or writes `VECTOR_BYTES` of the smallest array."""
    sizes = [array.size for array in inputs] + [math.prod(shape) for shape in shapes]
    dtype = inputs[0].dtype
    threads = min(sizes) * dtype.size // VECTOR_BYTES
    width = inputs[0].shape[-1]
    return kernel(name, (("T", dtype), ("HALVES", halves)))(
        inputs,
        [inputs[0].size // width, width] if halves else [width],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[dtype] * len(shapes),
    )
