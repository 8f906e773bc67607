"""The norm of heads: as the source that runs, on a CPU, and on CUDA the bits of MLX's operation."""

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import head_norm as module
from parallm.model.kernels.columns import columns_of
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.head_norm import fits, head_norm
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

EPS = 1e-6
MUTANTS = {
    "the first heads of the product": ("source + start +", "source +"),
    "rows beside each other": ("* pitch + head % heads * SIZE", "* heads * SIZE + head % heads * SIZE"),
    "a part of the squares": ("int step = 16;", "int step = 2;"),
}


def heads_of(size: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys (3, 1, 2, D) beside queries and values in one product, and a weight."""
    mx.random.seed(size)
    whole_B1W = mx.random.normal((3, 1, 8 * size)).astype(dtype)
    _, keys, _ = columns_of(whole_B1W, [4 * size, 2 * size, 2 * size])
    return keys.reshape(3, 1, 2, size), mx.random.normal((size,)).astype(dtype)


def agrees(size: int) -> bool:
    heads_B1XD, weight_D = heads_of(size, mx.float16)
    found = np.array(head_norm(heads_B1XD, weight_D, EPS), np.float32)
    values = np.array(heads_B1XD, np.float32)
    wanted = np.array(weight_D, np.float32) * values / np.sqrt(np.square(values).mean(-1, keepdims=True) + EPS)
    return np.allclose(found, wanted, rtol=4e-3, atol=4e-3)


@needs_compiler
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_each_head_has_its_own_norm(size: int, compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel", compiled)
    assert agrees(size)


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_reads_another_place_is_found(mutant: str, compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel", compiled)
    monkeypatch.setattr(compiled, "mutation", ("head_norm", *MUTANTS[mutant]))
    assert not agrees(128)


def test_only_whole_vectors_of_one_token_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda: True)
    heads, weight = heads_of(64, mx.float16)
    assert fits(heads, weight)
    for spoiled in (heads.astype(mx.float32), heads[..., :60], mx.zeros((3, 2, 2, 64), mx.float16), heads[:, 0]):
        assert not fits(spoiled, weight)
    assert not fits(heads, weight.astype(mx.bfloat16))
    assert not fits(*heads_of(264, mx.float16))


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_the_kernel_gives_the_bits_of_mlx(size: int, dtype: mx.Dtype) -> None:
    heads_B1XD, weight_D = heads_of(size, dtype)
    assert fits(heads_B1XD, weight_D)
    expected = mx.fast.rms_norm(mx.contiguous(heads_B1XD), weight_D, EPS)
    assert (head_norm(heads_B1XD, weight_D, EPS) == expected).mean().item() > 0.999
