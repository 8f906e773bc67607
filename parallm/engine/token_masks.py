"""Grammars' masks on logits.

Axes: B rows, W bytes of a mask, V vocabulary.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

EVERYTHING = 0xFF


def masked(logits_BV: mx.array, allowed_B: Sequence[bytes | None]) -> mx.array:
    """-inf for what a row's mask does not allow (`TokenMask.allowed`; None: no mask), in the dtype of the logits."""
    num_tokens = logits_BV.shape[1]
    num_bytes = -(-num_tokens // 8)
    bits_BW = np.zeros((len(allowed_B), num_bytes), np.uint8)
    for row, allowed in enumerate(allowed_B):
        if allowed is None:
            bits_BW[row] = EVERYTHING
        else:
            known = np.frombuffer(allowed, np.uint8)[:num_bytes]
            bits_BW[row, : len(known)] = known
    places_8 = mx.arange(8, dtype=mx.uint8)
    bits_BV = ((mx.array(bits_BW)[:, :, None] >> places_8) & 1).reshape(len(allowed_B), -1)[:, :num_tokens]
    return mx.where(bits_BV.astype(mx.bool_), logits_BV, -mx.inf)
