"""Writes the keys and values of a prompt's tokens into pages, in place, rotated where they have to be.

Sequences keep keys and values in pages of `PAGE` positions (https://arxiv.org/abs/2309.06180), any of a pool's. MLX
knows the pool as an input, as in `decode_attention`: it neither copies it nor waits for it. Whatever reads these
positions has to depend on the rotated queries, which are the result.

Axes: M tokens, Q query heads, H key-value heads, D head size, P pages, T positions of a page.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.kernels.columns import place_of
from parallm.model.kernels.cuda import VECTOR_BYTES, kernel
from parallm.model.kernels.decode_attention import RotaryAngles

PAGE = 64
"""Positions of a page."""
THREADS = 256  # of a block


def write_pages(
    heads: Sequence[mx.array],
    keys_PHTD: mx.array,
    values_PHTD: mx.array,
    slots_M: mx.array,
    rotary: RotaryAngles | None = None,
) -> mx.array:
    """Write token m's key and value to position `slots_M[m] % PAGE` of page `slots_M[m] // PAGE`, in place; the queries
    (M, Q, D). `heads` are queries (M, Q, 1, D), keys and values (M, H, 1, D); queries and keys are rotated first, where
    a `rotary` is given.

    The write happens when the result is evaluated. `slots_M` is int32; no slot is twice in it but for those that
    nothing reads.
    """
    tokens, query_heads, _, size = heads[0].shape
    key_heads, dtype = keys_PHTD.shape[1], keys_PHTD.dtype
    dims, paired = (2 * rotary.angles.shape[1], rotary.traditional) if rotary else (0, False)
    vectors = size * dtype.size // VECTOR_BYTES
    units = vectors - (0 if paired else dims * dtype.size // VECTOR_BYTES // 2)
    threads = tokens * ((query_heads + key_heads) * units + key_heads * vectors)
    places = [place_of(array) for array in heads]
    defines = (
        ("T", dtype),
        ("D", size),
        ("H", key_heads),
        ("G", query_heads // key_heads),
        ("PAGE", PAGE),
        ("DIMS", dims),
        ("PAIRED", paired),
    )
    turned: mx.array = kernel("page_write", defines)(
        [*(place.whole for place in places), keys_PHTD, values_PHTD, slots_M, rotary.angles if rotary else slots_M],
        [tokens, *(number for place in places for number in (place.start, place.pitch))],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(tokens, query_heads, size)],
        output_dtypes=[dtype],
    )[0]
    return turned
