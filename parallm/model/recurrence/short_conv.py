"""Causal convolutions of a few tokens, each channel by itself, as sums of shifted products.

MLX's convolution takes six times as long on a CPU, and may round differently for one token and for many; here each
token is the same sum. On CUDA it is a kernel.

Axes: B rows, T tokens, K width of the convolution, C channels, M tokens of a flat sequence.
"""

from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from parallm.model.kernels import short_conv as conv_kernel
from parallm.model.kernels.short_conv import Windows, windows_of
from parallm.model.recurrence.rows import PackedRows, rows_in_use, taken


def short_conv(padded_BLC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None) -> mx.array:
    """Rows of K - 1 + T tokens -> (B, T, C) in their type, summed in float32."""
    width = weight_CK1.shape[1]
    length = padded_BLC.shape[1] - width + 1
    wide_BLC, weight_KC = padded_BLC.astype(mx.float32), weight_CK1[:, :, 0].T.astype(mx.float32)
    if length == 1:
        total = (wide_BLC * weight_KC).sum(axis=1, keepdims=True)
    else:
        parts = [wide_BLC[:, place : place + length] * weight_KC[place] for place in range(width)]
        total = sum(parts[1:], parts[0])
    return (total if bias_C is None else total + bias_C).astype(padded_BLC.dtype)


def packed_short_conv(flat_MC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None, rows: PackedRows) -> mx.array:
    """The convolution of packed rows, each with zeros or the row that it continues before it, (M, C)."""
    tokens, places = rows.history(weight_CK1.shape[1] - 1)
    convolved_LC = short_conv(taken(flat_MC, tokens)[None], weight_CK1, bias_C)[0]
    # outputs begin K - 1 tokens after the inputs
    return taken(convolved_LC, places - (weight_CK1.shape[1] - 1) * (places >= 0))


class ShortConv(nn.Conv1d):
    """Such a convolution as a module; packed rows do not see each other's tokens."""

    def __call__(self, x: mx.array) -> mx.array:
        rows, weight, bias, width = rows_in_use(), self.weight, self.get("bias"), self.weight.shape[1]
        if conv_kernel.fits(x, weight, bias):
            windows = padded_windows(*x.shape[:2], width) if rows is None else packed_windows(rows, width, width - 1)
            outputs_MC = conv_kernel.short_conv(x.flatten(0, 1), weight, bias, windows)
            return outputs_MC.reshape(x.shape[0], -1, x.shape[2])
        if rows is None:
            return short_conv(x, weight, bias)
        # the row of packed tokens begins with zeros
        return packed_short_conv(x[0, width - 1 :], weight, bias, rows)[None]


@lru_cache(maxsize=64)
def padded_windows(num_rows: int, length: int, width: int) -> Windows:
    """The windows of rows of K - 1 + T tokens."""
    firsts_BT1 = np.arange(num_rows)[:, None, None] * length + np.arange(length - width + 1)[:, None]
    sources_MK = (firsts_BT1 + np.arange(width)).reshape(-1, width)
    return windows_of(sources_MK.astype(np.int32), num_rows * length)


@lru_cache(maxsize=8)  # all layers of a pass have the same
def packed_windows(rows: PackedRows, width: int, before: int) -> Windows:
    """The windows of packed rows with `before` zeros before the first."""
    tokens_L, places_M = rows.history(width - 1)
    seen_MK = tokens_L[np.maximum(places_M[:, None] + np.arange(1 - width, 1), 0)]
    sources_MK = np.where((places_M[:, None] >= 0) & (seen_MK >= 0), seen_MK + before, -1)
    return windows_of(sources_MK.astype(np.int32), rows.num_tokens + before)


def is_short(conv: nn.Conv1d) -> bool:
    """Whether each channel of an unpadded convolution is by itself."""
    return bool(conv.weight.shape[2] == 1 and conv.groups == conv.weight.shape[0]) and (
        (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    )
