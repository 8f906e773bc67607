"""One decode step's attention over pages as a CUDA kernel on tensor cores, which reads only the pages that rows see.

The pages of all rows are one list, of which each block takes an equal share, wherever rows begin and end in it: a step
takes as long as its keys and values take to be read, whether rows are few or many, alike or not. The list is made on
the device once for all layers of a step. Softmax is taken online (https://arxiv.org/abs/1805.02867) in float32; a row
that lies in several shares is merged by the block that ends last, as Stream-K does (https://arxiv.org/abs/2301.03598).

The kernel also rotates queries and new keys, and writes new keys and values into the pages, in place. That is sound for
the reasons in `decode_attention.py`.

Axes: B rows, N pages of a table, X pages of all rows, P pages of the pool, H key-value heads, Q query heads, T
positions of a page, D head size, W heads of a row beside each other.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.columns import place_of, shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.page_write import PAGE

WARPS = 4  # of a block: each has 16 positions of a page
STAGES = 3  # pages of a block that are under way together
MAX_HEAD_SIZE, HEAD_SIZE_STEP = 256, 16
MAX_QUERIES, MAX_VALUES = 16, 2048  # of a key head in a block: what tensor cores multiply at once, and registers hold
PROCESSORS = 132  # of an H200
PROCESSOR_BYTES = 228 * 1024  # of shared memory, of which a block takes 1 KB more than it asks for
BLOCK_BYTES = 1024 + WARPS * MAX_QUERIES * 8 + 16
MAX_BLOCKS = 3  # of a processor
PLAN_THREADS = 128
DTYPES = (mx.bfloat16, mx.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """The pages that a step's rows see in equal shares, for layers of one window. Each layer must depend on what the
    one before has attended to: all write into the same arrays."""

    pages_SX4: mx.array
    """Row, page, first position, row's length; int32."""
    counts: mx.array
    """The pages of a share and of all, and a counter for each row and tile of queries, which each layer leaves at zero;
    int32."""
    part_sums: mx.array
    """Memory for the parts of rows that lie in several shares, (2 S, Q, D) float32."""
    part_scales: mx.array
    """The same for their scales, (2 S, Q, 2)."""
    window: int


def fits(queries_BQTD: mx.array, keys_PHTD: mx.array, values_PHTD: mx.array) -> bool:
    """Whether `append_and_attend` can compute one token per row with these pools on this device."""
    size = keys_PHTD.shape[3]
    return (
        has_kernels()
        and queries_BQTD.shape[2] == 1
        and keys_PHTD.shape == values_PHTD.shape
        and queries_BQTD.dtype == keys_PHTD.dtype == values_PHTD.dtype
        and keys_PHTD.dtype in DTYPES
        and queries_BQTD.shape[3] == size
        and size <= MAX_HEAD_SIZE
        and size % HEAD_SIZE_STEP == 0
    )


def plan_pages(
    tables_BN: mx.array, lengths_B: mx.array, *, query_heads: int, key_heads: int, head_size: int, window: int = 0
) -> PagePlan:
    """A plan for rows that see positions 0 to `lengths_B[b]`, or the newest `window` of them (0: all)."""
    (rows, width), repeats = tables_BN.shape, query_heads // key_heads
    tile = queries_at_once(repeats, head_size)
    tiles = key_heads * (repeats // tile)
    shares = max(1, PROCESSORS * blocks_of(head_size, tile) // tiles)
    stride = -(-rows * width // shares)
    parts = (2 * shares, query_heads)
    pages_SX4, counts, part_sums, part_scales = kernel("paged_attention_plan", (("PAGE", PAGE),))(
        [tables_BN, lengths_B],
        [rows, width, window, tiles, shares, stride],
        grid=(rows * PLAN_THREADS, 1, 1),
        threadgroup=(PLAN_THREADS, 1, 1),
        output_shapes=[(shares, stride, 4), (2 + rows * tiles,), (*parts, head_size), (*parts, 2)],
        output_dtypes=[mx.int32, mx.int32, mx.float32, mx.float32],
    )
    return PagePlan(pages_SX4=pages_SX4, counts=counts, part_sums=part_sums, part_scales=part_scales, window=window)


def append_and_attend(
    queries_BQ1D: mx.array,
    new_keys_BH1D: mx.array,
    new_values_BH1D: mx.array,
    keys_PHTD: mx.array,
    values_PHTD: mx.array,
    plan: PagePlan,
    *,
    scale: float,
    rotary: RotaryAngles | None = None,
    sinks_Q: mx.array | None = None,
) -> mx.array:
    """Write row b's new key and value at its length's position, in place, and attend to what the plan says, and to the
    new position; (B, Q, 1, D). The pool may be its first page alone, a view.

    No two rows write in the same page, but for rows of length 0 that nothing reads, and the queries depend on what was
    attended to with the same plan before. The write happens when the result is evaluated. With a `rotary`, queries and
    new keys are rotated first. `sinks_Q` are float32.
    """
    rows, query_heads, _, size = queries_BQ1D.shape
    heads, dtype = keys_PHTD.shape[1], keys_PHTD.dtype
    repeats, (shares, stride, _) = query_heads // heads, plan.pages_SX4.shape
    tile = queries_at_once(repeats, size)
    dims = 2 * rotary.angles.shape[1] if rotary else 0
    columns = [place_of(array) for array in (queries_BQ1D, new_keys_BH1D, new_values_BH1D)]
    numbers = [number for place in columns for number in (place.start, place.pitch)]
    assert all(number * dtype.size % VECTOR_BYTES == 0 for number in numbers), "heads are copied in vectors"
    defines = (
        ("T", dtype),
        ("HEAD", size),
        ("HEADS", heads),
        ("REPEATS", repeats),
        ("TILE", tile),
        ("PAGE", PAGE),
        ("WARPS", WARPS),
        ("FRAGMENTS", 1),
        ("COLUMNS", PAGE),
        ("STAGES", STAGES),
        ("BLOCKS", blocks_of(size, tile)),
        ("DIMS", dims),
        ("PAIRED", rotary is not None and rotary.traditional),
        ("SINKS", sinks_Q is not None),
    )
    inputs = [*(place.whole for place in columns), keys_PHTD, values_PHTD, plan.pages_SX4, plan.counts]
    inputs += [plan.part_sums, plan.part_scales, rotary.angles if rotary else plan.counts]
    inputs += [] if sinks_Q is None else [sinks_Q]
    (attended_BW,) = kernel("paged_attention", defines, shared_memory=shared_bytes(size, tile, dims))(
        inputs,
        [stride, plan.window, scale * math.log2(math.e), *numbers],
        grid=(shares * heads * (repeats // tile) * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        output_shapes=[(rows, query_heads * size)],
        output_dtypes=[dtype],
    )
    return shaped(attended_BW, (rows, query_heads, 1, size))


def queries_at_once(repeats: int, head_size: int) -> int:
    """Queries of one key head that a block serves."""
    most = min(repeats, MAX_QUERIES, MAX_VALUES // head_size)
    return max(count for count in range(1, most + 1) if repeats % count == 0)


def shared_bytes(head_size: int, tile: int, dims: int) -> int:
    """Shared memory of a block: for each page keys, values, a row's queries and angles. Rows are 16 bytes longer than
    a head."""
    return STAGES * 2 * ((tile + 2 * PAGE) * (head_size + 8) + 4 * dims)


def blocks_of(head_size: int, tile: int) -> int:
    """Blocks that a processor runs together."""
    return max(1, min(MAX_BLOCKS, PROCESSOR_BYTES // (shared_bytes(head_size, tile, head_size) + BLOCK_BYTES)))
