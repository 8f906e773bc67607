"""One decode step's attention as a CUDA kernel that reads only the tokens that each row has.

MLX's own attention takes rows of different lengths with a mask, and is not fused then: 1.17 ms a layer on an H200 for
128 rows of up to 1,024 tokens. The kernel also writes the step's keys and values into the pool, in place: MLX knows the
pool as an input, so it neither copies it nor waits for it. That is sound because the only later readers are steps and
copies that come after this one in the stream. The kernel rotates queries and keys too (`patches/rotary.py`).

Softmax is taken online (https://arxiv.org/abs/1805.02867) in float32. A team of lanes takes a token: each lane loads 16
bytes of its key and of its value. The teams' sums are merged at the end of a block; where there are too few rows for
the device, several blocks share a row, and a second kernel merges theirs.

Axes: S slots, B active rows, each in a slot of its own, H key-value heads, Q query heads, L positions, D head size,
P parts.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.columns import place_of, shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel

THREADS = 128  # of a block
MIN_HEAD_SIZE, MAX_HEAD_SIZE, HEAD_SIZE_STEP = 64, 256, 32  # of heads
MAX_VALUES = 64  # of queries, and as many sums, in a thread's registers
PART_UNIT = 16  # of positions
TARGET_BLOCKS = 6 * 132  # of the grid: for each of an H200's processors a few, so that rows of unlike lengths even out
MIN_PART, MAX_PART = 64, 512  # positions of a part

DTYPES = (mx.bfloat16, mx.float16, mx.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryAngles:
    """The rotation of queries and new keys that is still to be done."""

    angles: mx.array
    """Cosine and sine for each pair of values of a row's heads, float32 (B, pairs, 2)."""
    traditional: bool
    """Pairs are neighbours, or else values that are as far apart as there are pairs."""


def fits(queries_BQTD: mx.array, keys_SHLD: mx.array, values_SHLD: mx.array) -> bool:
    """Whether `append_and_attend` can compute one token per row with these pools on this device."""
    size = keys_SHLD.shape[3]
    return (
        has_kernels()
        and queries_BQTD.shape[2] == 1
        and keys_SHLD.shape == values_SHLD.shape
        and queries_BQTD.dtype == keys_SHLD.dtype == values_SHLD.dtype
        and keys_SHLD.dtype in DTYPES
        and queries_BQTD.shape[3] == size
        and MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE
        and size % HEAD_SIZE_STEP == 0
    )


def append_and_attend(
    queries_BQ1D: mx.array,
    new_keys_BH1D: mx.array,
    new_values_BH1D: mx.array,
    keys_SHLD: mx.array,
    values_SHLD: mx.array,
    slots_B: mx.array,
    lengths_B: mx.array,
    *,
    scale: float,
    window: int = 0,
    rotary: RotaryAngles | None = None,
) -> mx.array:
    """Write row b's new key and value at position `lengths_B[b]` of slot `slots_B[b]`, in place, and attend to that
    position and all before it, or to the newest `window` of them (0: all); (B, Q, 1, D).

    The write happens when the result is evaluated. Both are int32; `lengths_B` is below L, and no slot is twice in
    `slots_B`. With a `rotary`, queries and new keys are rotated first.
    """
    rows, query_heads, _, size = queries_BQ1D.shape
    heads, positions = keys_SHLD.shape[1:3]
    repeats, lanes = query_heads // heads, lanes_of(size, keys_SHLD.dtype)
    tile = queries_at_once(repeats, size // lanes)
    blocks = rows * query_heads // tile
    parts = num_parts(blocks, positions)
    angles = rotary.angles if rotary else lengths_B  # not read
    columns = [place_of(array) for array in (queries_BQ1D, new_keys_BH1D, new_values_BH1D)]
    dtype, of_parts = keys_SHLD.dtype, (rows, query_heads, parts)
    defines = (
        ("T", dtype),
        ("D", size),
        ("H", heads),
        ("G", repeats),
        ("TILE", tile),
        ("LANES", lanes),
        ("THREADS", THREADS),
        ("DIMS", 2 * rotary.angles.shape[1] if rotary else 0),
        ("PAIRED", rotary is not None and rotary.traditional),
        ("PARTS", parts > 1),
        ("PART_UNIT", PART_UNIT),
    )
    shape = (rows, query_heads * size)
    attended = kernel("decode_attention", defines)(
        [*(place.whole for place in columns), keys_SHLD, values_SHLD, slots_B, lengths_B, angles],
        [positions, window, scale * math.log2(math.e), *(n for place in columns for n in (place.start, place.pitch))],
        grid=(blocks * THREADS, parts, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*of_parts, size), of_parts, of_parts] if parts > 1 else [shape],
        output_dtypes=[mx.float32] * 3 if parts > 1 else [dtype],
    )
    if parts > 1:
        part = -(-positions // parts)
        part += -part % PART_UNIT
        attended = kernel("decode_attention_merge", (("T", dtype), ("D", size)))(
            [*attended, lengths_B],
            [parts, part, query_heads],
            grid=(rows * query_heads * size, 1, 1),
            threadgroup=(size, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )
    return shaped(attended[0], (rows, query_heads, 1, size))


def lanes_of(size: int, dtype: mx.Dtype) -> int:
    """Lanes that share a token: a power of two, at most a warp, each with the same number of vectors."""
    vectors = size * dtype.size // VECTOR_BYTES
    return min(32, vectors & -vectors)


def queries_at_once(repeats: int, values: int) -> int:
    """Queries of one key-value head that a block serves; each takes two times `values` registers of a thread."""
    return max(count for count in range(1, repeats + 1) if repeats % count == 0 and count * values <= MAX_VALUES)


def num_parts(blocks: int, positions: int) -> int:
    """Blocks that share a row where there are `blocks` without sharing."""
    needed = max(-(-TARGET_BLOCKS // blocks), -(-positions // MAX_PART))
    return max(1, min(needed, positions // MIN_PART))
