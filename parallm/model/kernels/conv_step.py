"""One token of a short causal convolution of each channel by itself as one CUDA kernel, for decode steps.

It takes the place of a joined array, a state copied out of it, products and sums of each place, and silu: all of them
move a few kilobytes a row, and take what launches take. Sums are float32, rounded before silu as
`recurrence/short_conv.py` rounds them.

Axes: B rows, C channels, K width of the convolution.
"""

import mlx.core as mx

from parallm.model.kernels.columns import place_of
from parallm.model.kernels.cuda import VECTOR_BYTES, kernel
from parallm.model.kernels.recurrent import has_kernels

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_WIDTH = 8  # tokens in a thread's registers
THREADS = 128  # of a block


def fits(x_B1C: mx.array, state_BKC: mx.array | None, weight_CK1: mx.array, bias_C: mx.array | None) -> bool:
    """Whether `conv_step` can compute these on this device."""
    if state_BKC is None or x_B1C.ndim != 3 or not has_kernels():
        return False
    (rows, tokens, channels), width = x_B1C.shape, weight_CK1.shape[1]
    place = place_of(x_B1C)
    return (
        tokens == 1
        and 2 <= width <= MAX_WIDTH
        and weight_CK1.shape == (channels, width, 1)
        and state_BKC.shape == (rows, width - 1, channels)
        and x_B1C.dtype in DTYPES
        and all(array.dtype == x_B1C.dtype for array in (state_BKC, weight_CK1, bias_C) if array is not None)
        and all(number * x_B1C.dtype.size % VECTOR_BYTES == 0 for number in (channels, place.start, place.pitch))
    )


def conv_step(
    x_B1C: mx.array, state_BKC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None, *, has_silu: bool = True
) -> tuple[mx.array, mx.array]:
    """The token's outputs (B, 1, C), and the state after it, the newest K - 1 tokens (B, K - 1, C)."""
    rows, _, channels = x_B1C.shape
    place, dtype = place_of(x_B1C), x_B1C.dtype
    threads = rows * channels * dtype.size // VECTOR_BYTES
    defines = (
        ("T", dtype),
        ("K", weight_CK1.shape[1]),
        ("C", channels),
        ("BIASED", bias_C is not None),
        ("SILU", has_silu),
    )
    outputs_B1C, next_BKC = kernel("conv_step", defines)(
        [place.whole, state_BKC, weight_CK1, *([] if bias_C is None else [bias_C])],
        [rows, place.start, place.pitch],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x_B1C.shape, state_BKC.shape],
        output_dtypes=[dtype, dtype],
    )
    return outputs_B1C, next_BKC
