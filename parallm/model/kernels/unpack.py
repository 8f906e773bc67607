"""The weights of a quantized layer, unpacked: on CUDA by a kernel, at the speed at which they can be written.

MLX's own kernel wrote 0.45 of the 4.8 TB/s that an H200's memory takes. That was a third of the time of an update of an
8B base in 4 bits: every pass unpacks all weights twice, for its forward and for its backward.

Axes: O outputs, I inputs, W words of a row, G groups of a row.
"""

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.cuda import has_kernels, kernel

THREADS = 256  # of a block
OF_THREAD = 8  # numbers


def unpacked(layer: nn.Module, dtype: mx.Dtype) -> mx.array:
    """The weights of a quantized layer, (O, I)."""
    sizes = {"group_size": layer.group_size, "bits": layer.bits}
    if fits(layer, dtype):
        return unpack_weights(layer.weight, layer.scales, layer.biases, **sizes)
    return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), mode=layer.mode, **sizes).astype(dtype)


def fits(layer: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether `unpack_weights` can unpack the layer's weights into `dtype` on this device."""
    return has_kernels() and layer.mode == "affine" and layer.bits in (4, 8) and layer.scales.dtype == dtype


def unpack_weights(
    packed_OW: mx.array, scales_OG: mx.array, biases_OG: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """The weights (O, I) in the type of the scales: number x scale + bias, rounded once; 4 or 8 bits."""
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
