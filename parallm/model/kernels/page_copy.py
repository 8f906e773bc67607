"""Copies pages of keys and values to other pages of the same pools, in place.

The completions of a group share the pages of their prompt, but for the last one where it is not full: each goes on in a
copy of its own (https://arxiv.org/abs/2309.06180). MLX knows the pools as inputs, as in `decode_attention`.

Axes: P pages, H key-value heads, T positions of a page, D head size, C copies.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, kernel

THREADS = 256  # of a block
VECTORS_OF_THREAD = 8
MAX_ARRAYS = 128  # of one launch: its parameters have to fit in 4 KB


def copy_pages(pools: Sequence[mx.array], sources: Sequence[int], targets: Sequence[int]) -> list[mx.array]:
    """Copy page `sources[c]` of each pool (P, H, T, D) to its page `targets[c]`. It happens when what is returned is
    evaluated; no target is a source, or twice a target. Launches after that one see the copies."""
    plan_2C = mx.array([list(sources), list(targets)], mx.int32)
    alike: dict[tuple[object, ...], list[mx.array]] = {}
    for pool in pools:
        alike.setdefault((pool.shape, pool.dtype), []).append(pool)
    return [
        _copy(group[start : start + MAX_ARRAYS], plan_2C)
        for group in alike.values()
        for start in range(0, len(group), MAX_ARRAYS)
    ]


def _copy(pools: Sequence[mx.array], plan_2C: mx.array) -> mx.array:
    names = [f"const T* pool{index}" for index in range(len(pools))]
    cases = " ".join(f"case {i}: pool = pool{i}; break;" for i in range(1, len(pools)))
    _, heads, positions, size = pools[0].shape
    vectors = heads * positions * size * pools[0].dtype.size // VECTOR_BYTES
    blocks = max(1, -(-vectors // (THREADS * VECTORS_OF_THREAD)))
    return kernel("page_copy", (("T", pools[0].dtype), ("POINTERS", ", ".join(names)), ("CASES", cases)))(
        [*pools, plan_2C],
        [heads * positions * size, plan_2C.shape[1]],
        grid=(plan_2C.shape[1] * THREADS, blocks, len(pools)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )[0]
