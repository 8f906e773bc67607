"""Matrices of LoRA as one array in the type of products, by one CUDA kernel.

With MLX's operations each matrix takes four launches, in which the GPU waits for the host: a thousand for a new version
of a 0.5B model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from parallm.model.kernels.cuda import MIN_ON_DEVICE, has_kernels, interned_array, kernel

MAX_MATRICES = 128
THREADS, MAX_BLOCKS = 256, 64  # of a block, and for one matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix of LoRA, and its form where it is packed."""

    array: mx.array
    """float32: A (I, R) or B (R, O)."""
    is_transposed: bool
    """A is packed as (R, I)."""
    rank: int
    """Rows where it is packed: zeros follow after its own."""
    factor: float

    @property
    def own_rank(self) -> int:
        """R."""
        return int(self.array.shape[1 if self.is_transposed else 0])

    @property
    def width(self) -> int:
        """Columns where it is packed."""
        return int(self.array.shape[0 if self.is_transposed else 1])

    @property
    def size(self) -> int:
        return self.rank * self.width


def pack_matrices(matrices: Sequence[Matrix], dtype: mx.Dtype) -> mx.array:
    """The numbers of at most `MAX_MATRICES` matrices, one matrix after the other, (N,). They are multiplied by their
    factors in float32 and rounded once."""
    assert all(matrix.array.dtype == mx.float32 for matrix in matrices)
    if not has_kernels():
        return mx.concatenate([_packed(matrix, dtype) for matrix in matrices])
    arrays, count = [matrix.array for matrix in matrices], len(matrices)
    assert count <= MAX_MATRICES
    sizes = [matrix.size for matrix in matrices]
    table = [
        (start, matrix.rank, matrix.width, matrix.own_rank, int(matrix.is_transposed))
        for start, matrix in zip(accumulate(sizes, initial=0), matrices, strict=False)
    ]
    factors = [matrix.factor for matrix in matrices] + [0.0] * (MIN_ON_DEVICE - count)
    pointers = ", ".join(f"const float* matrix{i}" for i in range(MAX_MATRICES))
    cases = " ".join(f"case {i}: matrix = matrix{i}; break;" for i in range(1, MAX_MATRICES))
    blocks = min(MAX_BLOCKS, -(-max(sizes) // THREADS))
    (packed_N,) = kernel("pack_matrices", (("T", dtype), ("POINTERS", pointers), ("CASES", cases)))(
        [
            *arrays,
            *arrays[:1] * (MAX_MATRICES - count),
            interned_array(tuple(table), mx.int32),
            interned_array(tuple(factors), mx.float32),
        ],
        [blocks],
        grid=(count * blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(sum(sizes),)],
        output_dtypes=[dtype],
    )
    return packed_N


def _packed(matrix: Matrix, dtype: mx.Dtype) -> mx.array:
    array = matrix.array.T if matrix.is_transposed else matrix.array
    filled = mx.pad(array * matrix.factor, [(0, matrix.rank - matrix.own_rank), (0, 0)])
    return filled.astype(dtype).flatten()
