"""Lets what MLX launches later wait for work on another stream: by a kernel, because MLX does not tell its stream.

CUDA could let all streams of the context wait, but that would spoil what other threads capture meanwhile, such as a sum
over NCCL.
"""

import mlx.core as mx
import numpy as np

from parallm.model.kernels.cuda import MIN_ON_DEVICE, kernel

POLLS = 100_000_000
"""Looks at the counter, a microsecond each, before the process is given up."""
SHARED_BYTES = 6000
"""Shared memory that the kernel asks for and does not use. CUDA splits an SM's memory into L1 cache and shared memory
(the carveout) for the kernels on it, and cannot change the split before they end. Beside a kernel that asks for none,
an SM has no room for a block of `small_batch_gemm`, and steps of large models take longer. This size makes all of the
memory shared, and leaves room for such a block."""


def wait_until(counter: int, awaited: int) -> mx.array:
    """Wait on the device until the word of 32 bits at the address `counter` has counted to `awaited`; the device begins
    as the array is evaluated."""
    halves = np.array([counter], np.uint64).view(np.int32).tolist()
    return kernel("wait_until", (("POLLS", POLLS),), shared_memory=SHARED_BYTES)(
        [],
        [*halves, int(np.uint32(awaited).astype(np.int32))],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(MIN_ON_DEVICE,)],
        output_dtypes=[mx.int32],
    )[0]
