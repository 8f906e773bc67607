"""Weights of a quantized layer, unpacked by a CUDA kernel at the speed at which they can be written.

MLX's own wrote 0.45 TB/s of an H200's 4.8.

Axes: O outputs, I inputs, W words of a row, G groups of a row.
"""

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.cuda import has_kernels, kernel

THREADS = 256  # of a block
OF_THREAD = 8  # numbers


def fits(layer: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether `unpack_weights` can unpack the layer's weights into `dtype` on this device."""
    return has_kernels() and layer.mode == "affine" and layer.bits in (4, 8) and layer.scales.dtype == dtype


def unpack_weights(
    packed_OW: mx.array, scales_OG: mx.array, biases_OG: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """The weights (O, I) in the type of the scales: number x scale + bias, rounded once."""
    shape = packed_OW.shape[0], packed_OW.shape[1] * 32 // bits
    places = shape[0] * shape[1] // OF_THREAD
    (weights_OI,) = kernel("unpack_weights", (("T", scales_OG.dtype), ("BITS", bits), ("GROUP", group_size)))(
        [packed_OW, scales_OG, biases_OG],
        [places],
        grid=(-(-places // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[scales_OG.dtype],
    )
    return weights_OI
