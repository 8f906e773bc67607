"""Numbers between host and device: the kernel that fetches them, compiled for a CPU, and memory that is used again."""

import gc

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import host_memory
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.host_memory import UPLOADS, HostResult, Uploader, uploaded
from tests.model.kernels.cuda_on_cpu import CpuKernels


def arrays(count: int) -> list[host_memory.Numbers]:
    random = np.random.default_rng(count)
    shapes = [(1,), (3, 5), (20_000,), (16, 9, 2)]
    drawn = [random.integers(-(2**31), 2**31, shapes[place % len(shapes)], np.int32) for place in range(count)]
    return [one if place % 2 else one.astype(np.float32) for place, one in enumerate(drawn)]


@pytest.mark.skipif(has_kernels(), reason="the kernel itself is tested below")
def test_the_kernel_fetches_every_number(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "kernel", compiled)
    uploader = Uploader()
    for numbers in arrays(2 * UPLOADS + 4):
        array = uploader.upload(numbers)
        assert np.array(array).dtype == numbers.dtype
        assert np.array_equal(np.array(array), numbers)


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
def test_memory_is_not_used_again_before_it_was_fetched() -> None:
    given = arrays(4 * UPLOADS)
    on_device = [uploaded(numbers) for numbers in given]
    busy = mx.random.normal((4096, 4096))
    for _ in range(20):
        busy = busy @ busy / 64
    mx.async_eval(busy, on_device)
    more = [uploaded(numbers) for numbers in reversed(given)]
    mx.async_eval(more)
    for numbers, one, other in zip(given, on_device, reversed(more), strict=True):
        assert np.array_equal(np.array(one), numbers)
        assert np.array_equal(np.array(other), numbers)


def test_without_kernels_and_without_numbers_mlx_makes_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uploaded(np.zeros((0, 4), np.int32)).shape == (0, 4)
    monkeypatch.setattr(host_memory, "has_kernels", lambda: False)
    assert uploaded(np.arange(4, dtype=np.int32)).tolist() == [0, 1, 2, 3]


def test_memory_of_a_result_is_used_again_once_nobody_has_it() -> None:
    first = HostResult((2, 300))
    first._memory.numbers[:600] = np.arange(600)
    kept, address = first.read(), first.halves()
    second = HostResult((2, 300))
    assert second.halves() != address
    del first
    gc.collect()
    third = HostResult((600,))
    assert third.halves() == address
    third._memory.numbers[:] = 0
    assert kept.tolist() == np.arange(600).reshape(2, 300).tolist()
