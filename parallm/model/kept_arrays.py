"""Small arrays of numbers that the host writes, kept by what they hold.

What the host has written a GPU fetches page by page when a kernel first reads it, and MLX's CUDA build may copy a page
from the device before the host can write it. Most of what a step needs is what some step before needed, though, such as
the temperatures of as many rows.
"""

from functools import lru_cache

import mlx.core as mx

Number = int | float
MOST_KEPT = 512


@lru_cache(MOST_KEPT)
def kept_array(numbers: tuple[Number, ...] | tuple[tuple[Number, ...], ...], dtype: mx.Dtype) -> mx.array:
    """`mx.array` of these; the same one for the same numbers. Nobody may write into it."""
    return mx.array(numbers, dtype)
