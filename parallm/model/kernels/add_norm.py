"""A residual add and the RMSNorm after it (https://arxiv.org/abs/1910.07467) as one CUDA kernel, for decode steps.

Both read and write a few kilobytes a row, so what they take is what two kernels take to start, 64 times a step of an 8B
model. `patches/forward.py` finds the pairs. Sums are rounded as MLX rounds them, and squares are added in its order.
LoRA's product with B is part of the kernel, in the order of `expand` (`segmented_lora.py`), where B is small: here one
block reads all of it for each row.

Axes: B rows, T tokens, H hidden, S parts of a sum.
"""

import mlx.core as mx

from parallm.model.kernels.columns import shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel
from parallm.model.kernels.segmented_lora import ShrinkOutput

DTYPES = (mx.bfloat16, mx.float16)
MAX_CHUNKS = 8
MAX_FACTORS = 1 << 16  # values of B that a block reads: rank 16 of an 8B shape, the most that was tried


def fits(parts_SBTH: mx.array, stream_BTH: mx.array, lora: ShrinkOutput | None = None) -> bool:
    """Whether `add_norm` can compute these, of one token a row, on this device."""
    size = stream_BTH.shape[-1]
    return (
        has_kernels()
        and stream_BTH.ndim == 3
        and stream_BTH.shape[1] == 1
        and parts_SBTH.shape[1:] == stream_BTH.shape
        and stream_BTH.dtype in DTYPES
        and parts_SBTH.dtype in (stream_BTH.dtype, mx.float32)
        and size % _values(stream_BTH.dtype) == 0
        and threads_and_chunks(size, stream_BTH.dtype)[1] <= MAX_CHUNKS
        and (lora is None or sum(lora.weights.layout.ranks) * size <= MAX_FACTORS)
    )


def add_norm(
    parts_SBTH: mx.array, stream_BTH: mx.array, weight_H: mx.array, eps: float, *, lora: ShrinkOutput | None = None
) -> tuple[mx.array, mx.array]:
    """The sum of all parts, the stream and the product of `lora`, which has one target, and the sum's RMSNorm, both
    (B, T, H) in the stream's type."""
    splits, *rows, size = parts_SBTH.shape
    threads, chunks = threads_and_chunks(size, stream_BTH.dtype)
    inputs, sizes = [parts_SBTH, stream_BTH, weight_H], [rows[0] * rows[1]]
    if lora is not None:
        inputs += lora.inputs()
        sizes += [lora.hidden_PBTK.shape[0], *lora.weights.array_VN.shape]
    defines = (
        ("T", stream_BTH.dtype),
        ("Y", parts_SBTH.dtype),
        ("SPLITS", splits),
        ("SIZE", size),
        ("THREADS", threads),
        ("CHUNKS", chunks),
        ("HAS_LORA", lora is not None),
        ("SORTED", lora is not None and lora.weights.is_sorted),
        ("K", sum(lora.weights.layout.ranks) if lora else 0),
    )
    sums_BTH, normed_BH = kernel("add_norm", defines)(
        inputs,
        [float(eps), *sizes],
        grid=(sizes[0] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[stream_BTH.shape, (sizes[0], size)],
        output_dtypes=[stream_BTH.dtype] * 2,
    )
    return sums_BTH, shaped(normed_BH, stream_BTH.shape)


def threads_and_chunks(size: int, dtype: mx.Dtype) -> tuple[int, int]:
    """Threads of a block, and vectors of each, as MLX's kernel has them."""
    vectors = -(-size // _values(dtype))
    if vectors <= 64 or (vectors % 128 and vectors % 64 == 0 and vectors // 64 <= MAX_CHUNKS):
        return 64, -(-vectors // 64)
    return 128, -(-vectors // 128)


def _values(dtype: mx.Dtype) -> int:
    """Values of a vector."""
    return VECTOR_BYTES // dtype.size
