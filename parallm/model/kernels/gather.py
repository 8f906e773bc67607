"""Rows of an array by their indices, as CUDA kernels that compile in milliseconds.

MLX compiles its own when a process first needs them, for all numbers of axes at once: 3 to 11 s for each type and kind
of index. They are embeddings, the last tokens of prompts, what the sampler draws, and the rows that a loss reads. MLX
gathers for `x[0]`, too, where `x[0, ...]` is a view.

Axes: N rows, M chosen rows, W width, G groups, K rows of a group.
"""

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel

THREADS = 256  # of a block
UNITS = {16: "uint4", 8: "uint2", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}


def take_rows(source_NW: mx.array, indices: mx.array) -> mx.array:
    """source_NW[indices], (..., W). The indices are at least 0; with kernels nothing is differentiated."""
    if not has_kernels():
        return source_NW[indices]
    rows_MW = _gather(source_NW, indices.reshape(-1), picks=1, group=0)
    return rows_MW.reshape(*indices.shape, -1)


def take_in_groups(source_GKW: mx.array, indices_GM: mx.array) -> mx.array:
    """The rows of each group that its indices name, (G, M, W); they are at least 0, and not differentiated."""
    if not has_kernels():
        return mx.take_along_axis(source_GKW, indices_GM[:, :, None], axis=1)
    num_groups, group, width = source_GKW.shape
    picks = indices_GM.shape[1]
    rows_MW = _gather(source_GKW.reshape(-1, width), indices_GM.reshape(-1), picks=picks, group=group)
    return rows_MW.reshape(num_groups, picks, width)


def take_known_rows(source_NW: mx.array, indices_M: npt.NDArray[np.int32]) -> mx.array:
    """source_NW[indices_M], (M, W), which can be differentiated: a row's gradient is the sum of its readers', in
    float32."""
    if not has_kernels() or source_NW.shape[1] * source_NW.dtype.size % VECTOR_BYTES:
        return source_NW[mx.array(indices_M)]
    order_M = np.argsort(indices_M, kind="stable").astype(np.int32)
    starts = np.searchsorted(indices_M[order_M], np.arange(source_NW.shape[0] + 1)).astype(np.int32)
    readers = mx.array(order_M), mx.array(starts)

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(source_NW: mx.array) -> mx.array:
        return _gather(source_NW, mx.array(indices_M), picks=1, group=0)

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(source_NW: mx.array, cotangent_MW: mx.array, _: mx.array) -> mx.array:
        return _sum_readers(cotangent_MW, *readers, num_rows=source_NW.shape[0])

    rows_MW: mx.array = forward(source_NW)
    return rows_MW


def _gather(source_NW: mx.array, indices_M: mx.array, *, picks: int, group: int) -> mx.array:
    num_rows, row_bytes = indices_M.size, source_NW.shape[1] * source_NW.dtype.size
    unit = math.gcd(row_bytes, VECTOR_BYTES)
    width = row_bytes // unit
    (rows_MW,) = kernel("gather_rows", (("T", source_NW.dtype), ("UNIT", UNITS[unit])))(
        [source_NW, indices_M.astype(mx.int32)],
        [num_rows, width, picks, group],
        grid=(-(-num_rows * width // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_rows, source_NW.shape[1])],
        output_dtypes=[source_NW.dtype],
    )
    return rows_MW


def _sum_readers(cotangent_MW: mx.array, order_M: mx.array, starts: mx.array, *, num_rows: int) -> mx.array:
    width = cotangent_MW.shape[1]
    (gradient_NW,) = kernel("gather_rows_gradient", (("T", cotangent_MW.dtype),))(
        [cotangent_MW, order_M, starts],
        [width],
        grid=(num_rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_rows, width)],
        output_dtypes=[cotangent_MW.dtype],
    )
    return gradient_NW
