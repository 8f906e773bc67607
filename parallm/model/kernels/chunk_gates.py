"""Products of gates within chunks as one CUDA kernel, and one for their gradient; `recurrence/scan.py` takes them.

By MLX's operations they are masks, sums along axes of 64, and exponentials: 12 launches forward and as many back.

Axes: C tokens of a chunk.
"""

import math

import mlx.core as mx

from parallm.model.kernels.cuda import kernel
from parallm.model.kernels.recurrent import has_kernels

SIZES = (16, 32, 64)  # of chunks
THREADS = 64  # of a block

Gates = tuple[mx.array, mx.array, mx.array]
"""Gates of a chunk up to each token (.., C, 1), after each token (.., C, 1), and between two tokens (.., C, C)."""


def fits(log_a: mx.array) -> bool:
    """Whether `chunk_gates` can compute the gates of (.., C, 1) on this device."""
    return has_kernels() and log_a.dtype == mx.float32 and log_a.shape[-2] in SIZES and log_a.shape[-1] == 1


def chunk_gates(log_a: mx.array) -> Gates:
    """The products of gates whose logarithms are `log_a` (.., C, 1), float32; differentiable."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(log_a: mx.array) -> Gates:
        size = log_a.shape[-2]
        from_start, to_end, between = _run("chunk_gates", [log_a], [log_a.shape] * 2 + [(*log_a.shape[:-1], size)])
        return from_start, to_end, between

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(log_a: mx.array, cotangents: list[mx.array], outputs: list[mx.array]) -> mx.array:
        return _run("chunk_gates_gradient", [*outputs, *cotangents], [log_a.shape])[0]

    gates: Gates = forward(log_a)
    return gates


def _run(name: str, inputs: list[mx.array], shapes: list[tuple[int, ...]]) -> list[mx.array]:
    """Outputs of these shapes. The first input and the first output are (.., C, 1)."""
    *chunks, size, _ = shapes[0]
    count, of_block = math.prod(chunks), THREADS // size
    return kernel(name, (("C", size), ("CHUNKS", of_block)))(
        inputs,
        [count],
        grid=(-(-count // of_block) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )
