"""Copies arrays into others, in place: to where a captured step reads its inputs (`cuda_graph.py`).

MLX knows the targets as inputs, as in `page_write.py`.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, kernel

THREADS, MAX_BLOCKS = 256, 64  # of a block, and for one array
WORD_BYTES = 4


def copy_into(targets: Sequence[mx.array], sources: Sequence[mx.array], counter: int = 0) -> tuple[mx.array, int]:
    """Copy the first bytes of each source, as many as its target has, which are whole words of 32 bits. It happens when
    the array is evaluated that is returned.

    Each block of threads then adds 1 to the word at the address `counter`, if it is not 0; their number is returned,
    too.
    """
    pairs = [array for pair in zip(sources, targets, strict=True) for array in pair]
    assert all(target.nbytes <= source.nbytes for source, target in zip(sources, targets, strict=True))
    counts = [target.nbytes // WORD_BYTES for target in targets]
    blocks = max(1, min(MAX_BLOCKS, -(-max(counts) // THREADS)))
    names = ", ".join(f"const void* source{i}, const void* target{i}" for i in range(len(targets)))
    cases = " ".join(f"case {i}: source = source{i}, target = target{i}; break;" for i in range(1, len(targets)))
    (done,) = kernel("copy_into", (("POINTERS", names), ("CASES", cases)))(
        [*pairs, interned_array((*counts, *[0] * (MIN_ON_DEVICE - len(counts))), mx.int32)],
        [blocks, *np.array([counter], np.uint64).view(np.int32).tolist()],
        grid=(len(targets) * blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(MIN_ON_DEVICE,)],
        output_dtypes=[mx.int32],
    )
    return done, blocks * len(targets)
