"""Matrices of LoRA in one array, by the source that runs on CUDA, on a CPU, and by MLX's operations."""

import mlx.core as mx
import pytest

from parallm.model.kernels import pack_matrices as module
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.pack_matrices import Matrix, pack_matrices
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

MUTANTS = {
    "each matrix for the first": ("CASES", ""),
    "A is transposed": ("is_transposed ?", "false ?"),
    "zeros after own rows": ("row < filled ?", "true ?"),
    "the factor": (": i] * factor)", ": i])"),
    "the place of the matrix": ("packed + own[0]", "packed"),
}


def matrices() -> list[Matrix]:
    shapes = {(40, 6): (8, 0.25), (16, 16): (16, 1.0)}
    a = [
        Matrix(array=mx.random.normal(shape), is_transposed=True, rank=rank, factor=factor)
        for shape, (rank, factor) in shapes.items()
    ]
    b = [
        Matrix(array=mx.random.normal(shape[::-1]), is_transposed=False, rank=rank, factor=3 * factor)
        for shape, (rank, factor) in shapes.items()
    ]
    return [*a, *b]


def expected(dtype: mx.Dtype, given: list[Matrix]) -> mx.array:
    parts = []
    for matrix in given:
        rows = matrix.array.T if matrix.is_transposed else matrix.array
        zeros = mx.zeros((matrix.rank - rows.shape[0], rows.shape[1]))
        parts.append(mx.concatenate([rows * matrix.factor, zeros]).astype(dtype).reshape(-1))
    return mx.concatenate(parts)


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    monkeypatch.setattr(module, "kernel", compiled)
    monkeypatch.setattr(module, "has_kernels", lambda: True)
    return compiled


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_matrices_lie_one_after_the_other(dtype: mx.Dtype) -> None:
    given = matrices()
    assert mx.array_equal(pack_matrices(given, dtype), expected(dtype, given)).item()


@needs_compiler
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_kernel_packs_the_same_bits(count: int, kernels: CpuKernels) -> None:
    given = matrices()[-count:]
    assert mx.array_equal(pack_matrices(given, mx.float16), expected(mx.float16, given)).item()


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_packed_otherwise_is_found(mutant: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "mutation", ("pack_matrices", *MUTANTS[mutant]))
    given = matrices()
    assert not mx.array_equal(pack_matrices(given, mx.float16), expected(mx.float16, given)).item()


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
def test_a_gpu_packs_large_and_many_matrices_alike() -> None:
    given = [
        Matrix(array=mx.random.normal((896, 16)), is_transposed=True, rank=16, factor=1.0),
        Matrix(array=mx.random.normal((16, 4864)), is_transposed=False, rank=16, factor=2.0),
    ] * (module.MAX_MATRICES // 2)
    assert mx.array_equal(pack_matrices(given, mx.bfloat16), expected(mx.bfloat16, given)).item()
