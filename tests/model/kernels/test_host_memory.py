"""Numbers between host and device: the kernel that fetches them, compiled for a CPU, and memory that is used again."""

import gc
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import cuda, host_memory
from parallm.model.kernels.cuda import has_kernels, listed_kernels, uploaded
from parallm.model.kernels.host_memory import UPLOADS, HostMemory, HostResult
from tests.model.kernels.cuda_on_cpu import CpuKernels


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    monkeypatch.setattr(host_memory, "_memory", HostMemory())
    return host_memory._memory


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    if has_kernels():
        pytest.skip("the kernel itself is tested below")
    monkeypatch.setattr(cuda, "has_kernels", lambda: True)
    monkeypatch.setattr(cuda, "kernel", compiled)
    return compiled


def arrays(count: int) -> list[host_memory.Numbers]:
    random = np.random.default_rng(count)
    shapes = [(1,), (3, 5), (3_000,), (16, 9, 2)]
    drawn = [random.integers(-(2**31), 2**31, shapes[place % len(shapes)], np.int32) for place in range(count)]
    return [one if place % 2 else one.astype(np.float32) for place, one in enumerate(drawn)]


@pytest.mark.usefixtures("kernels")
def test_the_kernel_fetches_every_number() -> None:
    for numbers in arrays(4 * UPLOADS + 4):
        array = uploaded(numbers)
        assert np.array(array).dtype == numbers.dtype
        assert np.array_equal(np.array(array), numbers)


def test_the_control_finds_a_number_that_was_not_fetched(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "mutation", ("from_host", "i < count", "i + 1 < count"))
    numbers = np.arange(1, 400, dtype=np.int32)
    assert not np.array_equal(np.array(uploaded(numbers)), numbers)


def test_memory_serves_another_upload_once_the_oldest_was_fetched(kernels: CpuKernels, memory: HostMemory) -> None:
    for numbers in arrays(8 * UPLOADS):
        uploaded(numbers)
    assert [len(uploads) for uploads in memory.of_uploads.values()] == [UPLOADS] * len(memory.of_uploads)


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
def test_memory_is_not_used_again_before_it_was_fetched() -> None:
    given = arrays(16 * UPLOADS)
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


def test_an_upload_that_is_only_listed_takes_no_memory(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_kernels", lambda: True)
    with listed_kernels() as kernels:
        assert uploaded(np.ones((2, 3), np.float32)).tolist() == [[0.0] * 3] * 2
    assert [name for name, _ in kernels] == ["from_host"]
    assert not memory.of_uploads


def test_without_kernels_and_without_numbers_mlx_makes_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uploaded(np.zeros((0, 4), np.int32)).shape == (0, 4)
    monkeypatch.setattr(cuda, "has_kernels", lambda: False)
    assert uploaded(np.arange(4, dtype=np.int32)).tolist() == [0, 1, 2, 3]


def test_memory_of_a_result_is_used_again_once_nobody_has_it() -> None:
    first = HostResult((2, 300))
    first._numbers[:600] = np.arange(600)
    kept, address = first.read(), first.halves()
    second = HostResult((2, 300))
    assert second.halves() != address
    del first
    gc.collect()
    third = HostResult((600,))
    assert third.halves() == address
    third._numbers[:] = 0
    assert kept.tolist() == np.arange(600).reshape(2, 300).tolist()


def test_threads_have_memory_of_their_own() -> None:
    address = HostResult((9,)).halves()
    gc.collect()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: HostResult((9,)).halves()).result() != address
    assert HostResult((9,)).halves() == address


def test_memory_that_is_refused_is_told(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> host_memory.Memory:
        raise MemoryError(f"no memory for {size}")

    monkeypatch.setattr(memory, "allocate", refuse)
    with pytest.raises(MemoryError, match="no memory"):
        HostResult((9,))
    gc.collect()
