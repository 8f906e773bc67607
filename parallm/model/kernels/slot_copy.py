"""Copies computed prompts into slots of pools of keys and values, in place, and a slot's positions out of them.

MLX writes into an array in place only while nothing else holds it. A decode step in flight holds all pools, so a row
that joins by MLX's own operations costs a copy of every pool: 8.6 GB for 16 rows of 2,048 positions of an 8B shape in
pools of 4,096, where the row itself takes 0.27. Here MLX knows the pools as inputs, as in `decode_attention`. That is
sound because steps launched before precede the copy in the stream, and because later readers of these slots depend on
the kernel's result. A row that ends is copied out for prompts that begin with it: one launch, where MLX takes one for
each array.

Axes: N arrays (keys and values of all layers), P prompts, S slots, R rows that join, H key-value heads, T positions of
the prompts, L positions of the pools, D head size.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel

THREADS = 256  # of a block
VECTORS_OF_THREAD = 8
MAX_ARRAYS = 64  # of one launch, and as many pools: its parameters have to fit in 4 KB


def can_copy(prompts_N: Sequence[mx.array], pools_N: Sequence[mx.array]) -> bool:
    """Whether `copy_to_slots` can copy these (P, H, T, D) to these (S, H, L, D) on this device."""
    pairs = list(zip(prompts_N, pools_N, strict=True))
    return has_kernels() and all(
        prompt.dtype == pool.dtype
        and (prompt.shape[1], prompt.shape[3]) == (pool.shape[1], pool.shape[3])
        and _is_aligned(pool)
        for prompt, pool in pairs
    )


def copy_to_slots(
    prompts_N: Sequence[mx.array],
    pools_N: Sequence[mx.array],
    *,
    rows: Sequence[int],
    slots: Sequence[int],
    lengths: Sequence[int],
) -> mx.array:
    """Copy the first `lengths[r]` positions of each prompt's row `rows[r]` to slot `slots[r]` of the pool beside it.

    It happens when the result is evaluated: int32 zero, (1,). Each reader of these slots has to depend on it.
    """
    alike: dict[tuple[object, ...], list[tuple[mx.array, mx.array]]] = {}
    for prompt, pool in zip(prompts_N, pools_N, strict=True):
        alike.setdefault((prompt.shape, pool.shape, pool.dtype), []).append((prompt, pool))
    plan_3R = mx.array([list(rows), list(slots), list(lengths)], mx.int32)
    launches = [
        _copy_in(pairs[start : start + MAX_ARRAYS], plan_3R, max(lengths))
        for pairs in alike.values()
        for start in range(0, len(pairs), MAX_ARRAYS)
    ]
    return sum(launches[1:], launches[0])


def can_copy_out(pools_N: Sequence[mx.array]) -> bool:
    """Whether `copy_out` can copy from these (S, H, L, D) on this device."""
    first = pools_N[0]
    are_alike = all(pool.shape == first.shape and pool.dtype == first.dtype for pool in pools_N)
    return has_kernels() and are_alike and _is_aligned(first)


def copy_out(pools_N: Sequence[mx.array], slot: int, start: int, end: int) -> mx.array:
    """These positions of a slot of each pool, (N, H, end - start, D), as they are when it is evaluated."""
    range_3 = mx.array([slot, start, end - start], mx.int32)
    count = 2 * MAX_ARRAYS
    parts = [_copy_out(pools_N[at : at + count], range_3, end - start) for at in range(0, len(pools_N), count)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _copy_in(pairs: Sequence[tuple[mx.array, mx.array]], plan_3R: mx.array, max_length: int) -> mx.array:
    prompts, pools = zip(*pairs, strict=True)
    names = [f"const T* {kind}{index}" for kind in ("prompt", "pool") for index in range(len(pairs))]
    cases = " ".join(f"case {i}: from = prompt{i}; to = pool{i}; break;" for i in range(1, len(pairs)))
    _, heads, positions, size = pools[0].shape
    return kernel("slot_copy_in", (("T", pools[0].dtype), ("POINTERS", ", ".join(names)), ("CASES", cases)))(
        [*prompts, *pools, plan_3R],
        [heads, size, plan_3R.shape[1], prompts[0].shape[2], positions],
        grid=(plan_3R.shape[1] * heads * THREADS, _blocks(max_length, pools[0]), len(pairs)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )[0]


def _copy_out(pools: Sequence[mx.array], range_3: mx.array, num_positions: int) -> mx.array:
    _, heads, positions, size = pools[0].shape
    names = [f"const T* pool{index}" for index in range(len(pools))]
    cases = " ".join(f"case {i}: from = pool{i}; break;" for i in range(1, len(pools)))
    return kernel("slot_copy_out", (("T", pools[0].dtype), ("POINTERS", ", ".join(names)), ("CASES", cases)))(
        [*pools, range_3],
        [heads, size, positions],
        grid=(heads * THREADS, _blocks(num_positions, pools[0]), len(pools)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(len(pools), heads, num_positions, size)],
        output_dtypes=[pools[0].dtype],
    )[0]


def _is_aligned(pool_SHLD: mx.array) -> bool:
    return pool_SHLD.shape[3] * pool_SHLD.dtype.size % VECTOR_BYTES == 0


def _blocks(num_positions: int, pool_SHLD: mx.array) -> int:
    """Blocks that share one head of one row."""
    vectors = num_positions * pool_SHLD.shape[3] * pool_SHLD.dtype.size // VECTOR_BYTES
    return max(1, -(-vectors // (THREADS * VECTORS_OF_THREAD)))
