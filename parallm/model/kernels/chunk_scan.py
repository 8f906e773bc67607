"""States that pass through chunks, as one CUDA kernel for all steps of a stage; `recurrence/scan.py` has the terms.

By MLX's operations each step is five launches forward and six backward, and each of them reads and writes all states.
Here a block keeps 32 lines of a state in shared memory from a row's first chunk to its last. Arithmetic is float32.

Axes: N chunks, B rows, H heads, C tokens of a chunk, Dk, Dv head sizes.
"""

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, kernel
from parallm.model.kernels.recurrent import has_kernels

THREADS = 256  # of a block
SLICE, PAD = 32, 4  # lines of a block's state, and values between lines in shared memory
SIZES = (16, 32, 64)  # of chunks
MAX_SHARED_BYTES = 225_000  # of the 227 KB that a block may have

Scanned = tuple[mx.array, mx.array, mx.array]
"""S before each chunk (N, H, Dv, Dk), U (N, H, C, Dv), and S after the rows (B, H, Dv, Dk)."""


def fits(values_NHCV: mx.array, reads_NHCK: mx.array) -> bool:
    """Whether `chunk_scan` can compute these on this device."""
    (size, keys), values = reads_NHCK.shape[2:], values_NHCV.shape[3]
    return (
        has_kernels()
        and size in SIZES
        and keys % 32 == 0
        and values % SLICE == 0
        and values_NHCV.dtype == reads_NHCK.dtype == mx.float32
        and shared_bytes(size, keys) <= MAX_SHARED_BYTES
    )


def chunk_scan(
    values_NHCV: mx.array,
    reads_NHCK: mx.array,
    adds_NHCK: mx.array,
    decay: mx.array,
    initial_BHVK: mx.array,
    counts: Sequence[int],
    first: int,
    *,
    more_NHVK: mx.array | None = None,
) -> Scanned:
    """U = values - reads S^T and S <- decay S + U^T adds in each chunk, where S begins with the rows' initial states.

    Step n has `counts[n]` chunks, one of each of the first rows; they follow each other from chunk `first` on, and the
    outputs are of these alone. `decay` is (N, H, 1, 1) or (N, H, 1, Dk). With `more`, from the last chunk to the first,
    U = values + reads S^T and S <- decay S - U^T adds + more. No gradient.
    """
    _, heads, size, values = values_NHCV.shape
    rows, keys = initial_BHVK.shape[0], reads_NHCK.shape[3]
    starts = (0, *accumulate(counts))
    unread = (0,) * (MIN_ON_DEVICE - len(starts))
    defines = (
        ("C", size),
        ("DK", keys),
        ("DV", values),
        ("BY_CHANNEL", decay.shape[3] > 1),
        ("BACK", more_NHVK is not None),
        ("THREADS", THREADS),
    )
    states, deltas, last = kernel("chunk_scan", defines, shared_memory=shared_bytes(size, keys))(
        [
            *(values_NHCV, reads_NHCK, adds_NHCK, decay),
            *([] if more_NHVK is None else [more_NHVK]),
            *(initial_BHVK, interned_array(starts + unread, mx.int32)),
        ],
        [first, heads, len(counts)],
        grid=(rows * heads * (values // SLICE) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            (starts[-1], heads, values, keys),
            (starts[-1], heads, size, values),
            initial_BHVK.shape,
        ],
        output_dtypes=[mx.float32] * 3,
    )
    return states, deltas, last


def shared_bytes(size: int, keys: int) -> int:
    return 4 * ((2 * size + SLICE) * (keys + PAD) + size * (SLICE + PAD))
