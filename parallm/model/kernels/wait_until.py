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
"""Unused. A processor divides its memory into cache and shared memory by what a kernel asks for, and cannot divide it
anew before that kernel ends. So many bytes, for as many blocks as fit, are all of it: beside a kernel that asked for
none, a product whose blocks each need a processor takes a fifth longer (8B, 32 rows, H200). With those of a product
they are less than a processor has."""


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
