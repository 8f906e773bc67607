"""Kernels of our own for MLX's CUDA build. What uses one has a form in MLX's operations for other devices."""

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]

VECTOR_BYTES = 16  # what a thread reads at once
MIN_ON_DEVICE = 3  # numbers of 32 bits: MLX keeps arrays of 8 bytes and less in the host's memory, far from kernels
PACK = """
template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T values[size];
};
"""
"""A header: as many values as a thread reads at once."""


def on_cuda() -> bool:
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


@cache
def architecture() -> str:
    """Of the GPU, such as sm_90."""
    return str(mx.device_info()["architecture"])


@cache
def kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    header: str = "",
    *,
    copies_views: bool = True,
    shared_memory: int = 0,
) -> Kernel:
    """`source` is the body of the function; inputs come as pointers. `grid` counts threads.

    Inputs that are not row-contiguous are copied first, or else the source has to use their `_strides`. `shared_memory`
    is what `extern __shared__` has, in bytes.
    """
    found: Kernel = mx.fast.cuda_kernel(
        name,
        list(inputs),
        list(outputs),
        source,
        header,
        ensure_row_contiguous=copies_views,
        shared_memory=shared_memory,
    )
    return found


Number = int | float
MAX_CACHED = 512


@lru_cache(MAX_CACHED)
def interned_array(numbers: tuple[Number, ...] | tuple[tuple[Number, ...], ...], dtype: mx.Dtype) -> mx.array:
    """`mx.array` of these; the same one for the same numbers. Nobody may write into it."""
    return mx.array(numbers, dtype)
