"""Copies in place, as the source that runs, on a CPU, and on CUDA."""

import ctypes

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import copy_into as module
from parallm.model.kernels.copy_into import copy_into
from parallm.model.kernels.cuda import has_kernels
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

MUTANTS = {
    "each array into the first": ("CASES", ""),
    "a block's own part": ("blockIdx.x % sharing * blockDim.x + threadIdx.x", "threadIdx.x + blockDim.x"),
    "nobody hears of it": ("if (arrived != nullptr) atomicAdd(arrived, 1);", ""),
}


def is_right() -> bool:
    sources = [mx.random.normal((40, 70)), mx.arange(5), mx.arange(12, dtype=mx.int16).reshape(3, 4)]
    targets = [mx.zeros((40, 70)), mx.zeros(4, mx.int32), mx.zeros((3, 4), mx.int16)]
    mx.eval(sources, targets)
    arrived = ctypes.c_int32(7)
    done, blocks = copy_into(targets, sources, ctypes.addressof(arrived))
    mx.eval(done)
    are_there = [
        np.array_equal(np.asarray(target).ravel(), np.asarray(source).ravel()[: target.size])
        for target, source in zip(targets, sources, strict=True)
    ]
    return all(are_there) and arrived.value == 7 + blocks


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    monkeypatch.setattr(module, "kernel", compiled)
    return compiled


@needs_compiler
def test_all_is_copied_and_each_block_is_counted(kernels: CpuKernels) -> None:
    assert is_right()


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_not_copied_is_found(mutant: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "mutation", ("copy_into", *MUTANTS[mutant]))
    assert not is_right()


def test_a_target_is_no_larger_than_its_source() -> None:
    with pytest.raises(AssertionError):
        copy_into([mx.zeros(3)], [mx.zeros(2)])


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
def test_a_gpu_copies_without_a_counter() -> None:
    source, target = mx.random.normal((300, 50)), mx.zeros((300, 50))
    mx.eval(source, target, copy_into([target], [source])[0])
    assert mx.array_equal(source, target).item()
