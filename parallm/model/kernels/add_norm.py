"""A residual add and the RMSNorm after it (https://arxiv.org/abs/1910.07467) as one CUDA kernel, for decode steps.

Both read and write a few kilobytes a row, so what they take is what two kernels take to start, 64 times a step of an 8B
model. `patches/forward.py` finds the pairs. Sums are rounded as MLX rounds them, and squares are added in its order.
LoRA's product with B is part of the kernel, in the order of `expand` (`segmented_lora.py`), where B is small: here each
row's block holds all of it. So is the product of what is normed with A of the targets that come next: then their own
product adds theirs with B (`small_batch_gemm.py`), and no kernel is left between them.

Axes: B rows, T tokens, H hidden, S parts of a sum.
"""

import mlx.core as mx

from parallm.model.kernels.columns import shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel, max_shared_bytes
from parallm.model.kernels.segmented_lora import GroupWeights, ShrinkOutput

DTYPES = (mx.bfloat16, mx.float16)
MAX_CHUNKS = 8
MAX_FACTORS = 1 << 16  # values of B that a block holds: rank 16 of an 8B shape, the most that was tried
MAX_ROWS_OF_A = 256  # that are multiplied by A
BYTES_OF_ROW = 20 << 10  # shared memory for the row itself, and for sums
USUAL_BYTES = 48 << 10  # that a block may have unless MLX asks for more, as it does where factors alone take more
THREADS_OF_COLUMN, MAX_THREADS_OF_COLUMNS = 8, 512


def fits(parts_SBTH: mx.array | None, stream_BTH: mx.array, lora: ShrinkOutput | None = None) -> bool:
    """Whether `add_norm` can compute these, of one token a row, on this device."""
    parts_SBTH = stream_BTH[None] if parts_SBTH is None else parts_SBTH
    size = stream_BTH.shape[-1]
    factors = _ranks(lora) * size
    return (
        has_kernels()
        and stream_BTH.ndim == 3
        and stream_BTH.shape[1] == 1
        and parts_SBTH.shape[1:] == stream_BTH.shape
        and stream_BTH.dtype in DTYPES
        and parts_SBTH.dtype in (stream_BTH.dtype, mx.float32)
        and size % _values(stream_BTH.dtype) == 0
        and threads_and_chunks(size, stream_BTH.dtype)[1] <= MAX_CHUNKS
        and factors <= MAX_FACTORS
        and (lora is None or _has_room(factors * stream_BTH.dtype.size))
    )


def can_shrink(stream_BTH: mx.array, lora: ShrinkOutput | None, weights: GroupWeights) -> bool:
    """Whether `add_norm`, beside the product of `lora`, can multiply rows by A of `weights`: of one version, as several
    need rows in another order; rank 16 of a 1.5B shape has room on Hopper. Each row's block reads A, so that more rows
    are left to `small_batch_gemm`."""
    size, dtype = stream_BTH.shape[-1], stream_BTH.dtype
    columns = _ranks(lora) + sum(weights.layout.ranks)
    has_one = weights.array_VN.shape[0] == 1 and weights.num_inputs == size
    has_few = stream_BTH.shape[0] * stream_BTH.shape[1] <= MAX_ROWS_OF_A
    return has_one and has_few and weights.array_VN.dtype == dtype and _has_room(columns * size * dtype.size)


def _ranks(lora: ShrinkOutput | None) -> int:
    return sum(lora.weights.layout.ranks) if lora else 0


def _has_room(num_bytes: int) -> bool:
    """Whether a block may hold factors of this size beside its row."""
    return num_bytes + BYTES_OF_ROW <= max_shared_bytes()


def add_norm(
    parts_SBTH: mx.array | None,
    stream_BTH: mx.array,
    weight_H: mx.array,
    eps: float,
    *,
    lora: ShrinkOutput | None = None,
    following: tuple[GroupWeights, mx.array] | None = None,
) -> list[mx.array]:
    """The sum of all parts (None: no parts), the stream and the product of `lora`, which has one target, and the sum's
    RMSNorm, both (B, T, H) in the stream's type. With the weights that come next and the `order_B2` of the rows
    (`can_shrink`) also the norm's products with A, (B, K) in the stream's type."""
    *rows, size = stream_BTH.shape
    splits, given = (0, stream_BTH) if parts_SBTH is None else (parts_SBTH.shape[0], parts_SBTH)
    threads, chunks = threads_and_chunks(size, stream_BTH.dtype)
    block = max(threads, -(-size // _values(stream_BTH.dtype) // 32) * 32)
    inputs, sizes = [given, stream_BTH, weight_H], [rows[0] * rows[1]]
    if lora is not None:
        inputs += lora.inputs()
        sizes += [lora.hidden_PBTK.shape[0], *lora.weights.array_VN.shape]
    ranks, columns = _ranks(lora), 0
    if following is not None:
        weights, order_B2 = following
        inputs += [order_B2, weights.starts, weights.array_VN]
        columns = sum(weights.layout.ranks)
        block = max(block, min(columns * THREADS_OF_COLUMN, MAX_THREADS_OF_COLUMNS))
    defines = (
        ("T", stream_BTH.dtype),
        ("Y", given.dtype),
        ("SPLITS", splits),
        ("SIZE", size),
        ("THREADS", threads),
        ("CHUNKS", chunks),
        ("BLOCK", block),
        ("HAS_LORA", lora is not None),
        ("SORTED", lora is not None and lora.weights.is_sorted),
        ("K", ranks),
        ("SHRINKS", following is not None),
        ("SHRUNK", columns),
    )
    shared_memory = (ranks + columns) * size * stream_BTH.dtype.size
    if shared_memory and shared_memory + BYTES_OF_ROW > USUAL_BYTES:
        shared_memory = max(shared_memory, USUAL_BYTES)
    sums_BTH, normed_BH, *shrunk = kernel("add_norm", defines, shared_memory=shared_memory)(
        inputs,
        [float(eps), *sizes],
        grid=(sizes[0] * block, 1, 1),
        threadgroup=(block, 1, 1),
        output_shapes=[stream_BTH.shape, (sizes[0], size), *([(sizes[0], columns)] if following else [])],
        output_dtypes=[stream_BTH.dtype] * (3 if following else 2),
    )
    return [sums_BTH, shaped(normed_BH, stream_BTH.shape), *shrunk]


def threads_and_chunks(size: int, dtype: mx.Dtype) -> tuple[int, int]:
    """Threads that sum up squares, and vectors of each, as MLX's kernel has them."""
    vectors = -(-size // _values(dtype))
    if vectors <= 64 or (vectors % 128 and vectors % 64 == 0 and vectors // 64 <= MAX_CHUNKS):
        return 64, -(-vectors // 64)
    return 128, -(-vectors // 128)


def _values(dtype: mx.Dtype) -> int:
    """Values of a vector."""
    return VECTOR_BYTES // dtype.size
