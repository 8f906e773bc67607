"""Short causal convolutions of many tokens, each channel by itself, as one CUDA kernel forward and one backward.

By MLX's operations a pass over packed rows gathers tokens, widens them, sums a product for each place, and gathers
outputs: 15 launches forward and 14 backward, most of them over arrays of float32. Here outputs know their tokens. Sums
are float32, rounded once.

Axes: N tokens of the input, M outputs, K width of the convolution, C channels.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.cuda import MIN_ON_DEVICE, VECTOR_BYTES, kernel
from parallm.model.kernels.recurrent import has_kernels

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_WIDTH = 8  # of a convolution: its weights are in a thread's registers
TOKENS = 8  # of a thread
THREADS = 128  # of a block


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens that outputs see."""

    sources: mx.array
    """(M, K) int32: the token at each place, -1 for none; an output without its newest token is zero."""
    starts: mx.array
    """(N + 1,) int32: where the readers of each token begin."""
    readers: mx.array
    """The places at which tokens are read, those of the first one first: output m, place i is m K + i."""
    num_tokens: int
    """N."""


def windows_of(sources_MK: npt.NDArray[np.int32], num_tokens: int) -> Windows:
    """Windows of `num_tokens` from the token at each place, -1 for none."""
    flat = sources_MK.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    starts = np.searchsorted(flat[order], np.arange(num_tokens + 1)).astype(np.int32)
    arrays = [np.pad(array, (0, max(0, MIN_ON_DEVICE - array.size))) for array in (starts, order)]
    return Windows(mx.array(sources_MK), mx.array(arrays[0]), mx.array(arrays[1]), num_tokens)


def fits(x_NC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None) -> bool:
    """Whether `short_conv` can compute these on this device."""
    return (
        has_kernels()
        and x_NC.dtype in DTYPES
        and weight_CK1.shape[1] <= MAX_WIDTH
        and all(array.dtype == x_NC.dtype for array in (weight_CK1, bias_C) if array is not None)
        and x_NC.shape[-1] * x_NC.dtype.size % VECTOR_BYTES == 0
    )


def short_conv(x_NC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None, windows: Windows) -> mx.array:
    """The outputs (M, C), in the input's type; differentiable by the input."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x: mx.array) -> mx.array:
        inputs = [x, weight_CK1, *([] if bias_C is None else [bias_C]), windows.sources]
        return _run("short_conv", inputs, (("BIASED", bias_C is not None),), windows.sources.shape[0])

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
        return convolution_gradient(cotangent, weight_CK1, windows)

    outputs_MC: mx.array = forward(x_NC)
    return outputs_MC


def convolution_gradient(cotangent_MC: mx.array, weight_CK1: mx.array, windows: Windows) -> mx.array:
    """The gradient of the inputs (N, C), given that of the outputs."""
    inputs = [cotangent_MC, weight_CK1, windows.starts, windows.readers]
    return _run("short_conv_gradient", inputs, (), windows.num_tokens)


def _run(name: str, inputs: list[mx.array], defines: tuple[tuple[str, bool], ...], tokens: int) -> mx.array:
    """Some output of `tokens` from inputs of which the first is of its type and the second is the weight."""
    dtype, (channels, width) = inputs[0].dtype, inputs[1].shape[:2]
    threads = channels * dtype.size // VECTOR_BYTES * -(-tokens // TOKENS)
    sizes = (("T", dtype), ("C", channels), ("K", width), ("TOKENS", TOKENS))
    return kernel(name, (*sizes, *defines))(
        inputs,
        [tokens],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(tokens, channels)],
        output_dtypes=[dtype],
    )[0]
