"""CUDA kernels of our own: a `.cu` file beside this module becomes a function of MLX's CUDA build.

Each kernel has one Python face in this folder, which alone calls `kernel`; other devices compute the same with MLX's
operations. A `.cu` file holds the body of a function: MLX writes its head, with a pointer for each input and output,
`x_shape` and `x_strides` where the body reads them, and the constants of a call's `template`.
"""

import re
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]
Number = int | float

VECTOR_BYTES = 16  # what a thread reads at once, `Pack` in pack.cuh
MIN_ON_DEVICE = 3  # numbers of 32 bits: MLX keeps arrays of 8 bytes and less in the host's memory, far from kernels
MAX_INTERNED = 512
FOLDER = Path(__file__).parent
INCLUDE = re.compile(r'^#include "(.+)"\n', re.M)


def on_cuda() -> bool:
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


@cache
def architecture() -> str:
    """The GPU's, such as sm_90."""
    return str(mx.device_info()["architecture"])


@cache
def kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    defines: tuple[tuple[str, int | str], ...] = (),
    copies_views: bool = True,
    shared_memory: int = 0,
) -> Kernel:
    """The function in `{name}.cu`; its `grid` counts threads.

    `defines` are macros: lists, and conditions of `#if`. Without `copies_views` an input may be strided, and the source
    reads its `_strides`. `shared_memory` is the size of `extern __shared__` in bytes.
    """
    source = (FOLDER / f"{name}.cu").read_text()
    macros = [f"#define {macro} {int(value) if isinstance(value, bool) else value}\n" for macro, value in defines]
    headers = [(FOLDER / header).read_text() for header in INCLUDE.findall(source)]
    if defines:  # MLX keeps what it compiled by its name
        name = f"{name}_{zlib.crc32(repr(defines).encode()):08x}"
    function: Kernel = mx.fast.cuda_kernel(
        name,
        list(inputs),
        list(outputs),
        INCLUDE.sub("", source),
        "".join(macros + headers),
        ensure_row_contiguous=copies_views,
        shared_memory=shared_memory,
    )
    return function


@lru_cache(MAX_INTERNED)
def interned_array(numbers: tuple[Number, ...] | tuple[tuple[Number, ...], ...], dtype: mx.Dtype) -> mx.array:
    """`mx.array` of these numbers, the same array for the same numbers; it must not be written into.

    A GPU fetches what the host has written page by page when a kernel first reads it, and MLX's CUDA build may copy a
    page from the device before the host can write it. A step mostly needs numbers that an earlier step needed too, such
    as the temperatures of as many rows.
    """
    return mx.array(numbers, dtype)
