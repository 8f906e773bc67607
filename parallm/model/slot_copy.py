"""Copies computed prompts into slots of pools of keys and values, in place, as a CUDA kernel.

MLX writes into an array in place only while nothing else holds it. A decode step in flight holds all pools, so a row
that joins by MLX's own operations costs a copy of every pool: 8.6 GB for 16 rows of 2,048 positions of an 8B shape in
pools of 4,096, where the row itself takes 0.27. Here MLX knows the pools as inputs that nobody changes, as in
`decode_attention`. That is sound because steps launched before are in front of the copy in the stream, and because
whatever reads these slots later depends on what the kernel gives back.

Axes: N arrays (keys and values of all layers), P prompts, S slots, R rows that join, H key-value heads, T positions of
the prompts, L positions of the pools, D head size.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.cuda import VECTOR_BYTES, Kernel, kernel, on_cuda
from parallm.model.slot_copy_source import PACKS_OF_THREAD, THREADS, source

MOST_ARRAYS = 64  # of one launch, and as many pools: its parameters have to fit in 4 KB


def can_copy(prompts_N: Sequence[mx.array], pools_N: Sequence[mx.array]) -> bool:
    """Whether `copy_to_slots` can copy these (P, H, T, D) to these (S, H, L, D) on this device."""
    pairs = list(zip(prompts_N, pools_N, strict=True))
    return on_cuda() and all(
        prompt.dtype == pool.dtype
        and (prompt.shape[1], prompt.shape[3]) == (pool.shape[1], pool.shape[3])
        and pool.shape[3] * pool.dtype.size % VECTOR_BYTES == 0
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

    It happens when the result is evaluated: int32 zero, (1,), on which all that reads these slots has to depend.
    """
    alike: dict[tuple[object, ...], list[tuple[mx.array, mx.array]]] = {}
    for prompt, pool in zip(prompts_N, pools_N, strict=True):
        alike.setdefault((prompt.shape, pool.shape, pool.dtype), []).append((prompt, pool))
    plan_3R = mx.array([list(rows), list(slots), list(lengths)], mx.int32)
    launches = [
        _launch(pairs[start : start + MOST_ARRAYS], plan_3R, max(lengths))
        for pairs in alike.values()
        for start in range(0, len(pairs), MOST_ARRAYS)
    ]
    return sum(launches[1:], launches[0])


def _launch(pairs: Sequence[tuple[mx.array, mx.array]], plan_3R: mx.array, longest: int) -> mx.array:
    _, heads, _, size = pairs[0][1].shape
    packs = longest * size * pairs[0][1].dtype.size // VECTOR_BYTES  # of one head of one row
    blocks = max(1, -(-packs // (THREADS * PACKS_OF_THREAD)))
    (done,) = _kernel(len(pairs))(
        inputs=[*(prompt for prompt, _ in pairs), *(pool for _, pool in pairs), plan_3R],
        template=[("T", pairs[0][1].dtype)],
        grid=(plan_3R.shape[1] * heads * THREADS, blocks, len(pairs)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


def _kernel(num_arrays: int) -> Kernel:
    names = [f"{kind}{place}" for kind in ("prompt", "pool") for place in range(num_arrays)]
    return kernel(f"copy_to_slots_{num_arrays}", (*names, "plan"), ("done",), source(num_arrays))
