"""Causal convolutions of a few tokens, each channel by itself, as sums of shifted products.

MLX's convolution takes six times as long on a CPU, and may round differently for one token and for many; here each
token is the same sum.

Axes: B rows, T tokens, K width of the convolution, C channels, M tokens of a flat sequence.
"""

import mlx.core as mx
import mlx.nn as nn

from parallm.model.recurrence.rows import PackedRows, rows_in_use, taken


def short_conv(padded_BLC: mx.array, weight_CK1: mx.array, bias_C: mx.array | None) -> mx.array:
    """Rows of K - 1 + T tokens -> (B, T, C) in their type, summed in float32."""
    width = weight_CK1.shape[1]
    length = padded_BLC.shape[1] - width + 1
    wide_BLC, weight_CK = padded_BLC.astype(mx.float32), weight_CK1[:, :, 0].astype(mx.float32)
    total = sum(wide_BLC[:, place : place + length] * weight_CK[:, place] for place in range(width))
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
        rows = rows_in_use()
        if rows is None:
            return short_conv(x, self.weight, self.get("bias"))
        # the row of packed tokens begins with zeros
        flat_MC = x[0, self.weight.shape[1] - 1 :]
        return packed_short_conv(flat_MC, self.weight, self.get("bias"), rows)[None]


def is_short(conv: nn.Conv1d) -> bool:
    """Whether each channel of an unpadded convolution is by itself."""
    return bool(conv.weight.shape[2] == 1 and conv.groups == conv.weight.shape[0]) and (
        (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    )
