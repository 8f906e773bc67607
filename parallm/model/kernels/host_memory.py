"""Numbers that go from the host to the device and back, through page-locked memory that kernels read and write.

MLX keeps what the host writes or reads in managed memory, whose pages move to the side that touches them: a kernel of a
decode step waits 0.15 ms for one on an H200. And where a new array takes memory that was the device's, MLX copies it
and may wait for all that the device computes. Page-locked memory stays where it is. MLX does not know it, so a kernel
gets its address as two scalars. For the thread that owns the device alone.
"""

import ctypes
import math
from collections import defaultdict
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.cuda import has_kernels, kernel, on_cuda

PORTABLE, DEVICE_MAP = 1, 2  # of cuMemHostAlloc
MIN_NUMBERS = 256
UPLOADS = 64
"""Uploads after which memory is used again, more than the steps in flight have."""
THREADS = 256  # of a block
MAX_BLOCKS = 64

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class HostMemory:
    """Numbers of 32 bits in page-locked memory, which is never freed: a kernel may still use it."""

    def __init__(self, size: int) -> None:
        """Raises MemoryError."""
        self.numbers: npt.NDArray[np.int32] = _page_locked(size) if on_cuda() else np.zeros(size, np.int32)

    def halves(self) -> tuple[int, int]:
        """The address, its lower 32 bits first, as kernels take it."""
        low, high = np.array([self.numbers.ctypes.data], np.uint64).view(np.int32).tolist()
        return low, high


_free: defaultdict[int, list[HostMemory]] = defaultdict(list)  # of results that nobody has, by size


class HostResult:
    """Numbers that a kernel writes for the host. They are there once an output of the same launch is evaluated."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        size = _size_for(math.prod(shape))
        # A launch whose result nobody has read may still write: before the launch of the next owner, in one stream
        self._memory = _free[size].pop() if _free[size] else HostMemory(size)

    def halves(self) -> tuple[int, int]:
        return self._memory.halves()

    def read(self) -> npt.NDArray[np.int32]:
        """A copy."""
        return self._memory.numbers[: math.prod(self._shape)].reshape(self._shape).copy()

    def __del__(self) -> None:
        _free[len(self._memory.numbers)].append(self._memory)


class Uploader:
    """Copies numbers of the host into arrays of the device, whose kernels have yet to run."""

    def __init__(self) -> None:
        self._slots: list[tuple[HostMemory, mx.array] | None] = [None] * UPLOADS
        self._num_uploads = 0

    def upload(self, numbers: Numbers) -> mx.array:
        """An array of the same numbers, int32 or float32."""
        place = self._num_uploads % UPLOADS
        self._num_uploads += 1
        slot, size = self._slots[place], _size_for(numbers.size)
        if slot is None or len(slot[0].numbers) < size:
            memory = HostMemory(size)
        else:
            memory, reader = slot
            mx.eval(reader)
        memory.numbers[: numbers.size] = numbers.reshape(-1).view(np.int32)
        blocks, dtype = min(MAX_BLOCKS, -(-numbers.size // THREADS)), getattr(mx, numbers.dtype.name)
        (array,) = kernel("from_host", (("T", dtype),))(
            [],
            [numbers.size, *memory.halves()],
            grid=(blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[numbers.shape],
            output_dtypes=[dtype],
        )
        self._slots[place] = memory, array
        return array


_uploader = Uploader()


def uploaded(numbers: Numbers) -> mx.array:
    """The same numbers on the device, int32 or float32; not for use inside a function that MLX compiles, which would
    repeat the copy of memory that has other numbers by then."""
    return _uploader.upload(numbers) if has_kernels() and numbers.size else mx.array(numbers)


def _size_for(count: int) -> int:
    return max(MIN_NUMBERS, 1 << max(count - 1, 0).bit_length())


def _page_locked(size: int) -> npt.NDArray[np.int32]:
    mx.eval(mx.zeros(1))  # gives this thread a context of CUDA
    pointer = ctypes.c_void_p()
    status = _driver().cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 * size), PORTABLE | DEVICE_MAP)
    if status or pointer.value is None:
        raise MemoryError(f"CUDA gives no page-locked memory for {4 * size} bytes: error {status}")
    numbers = np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(pointer.value))
    numbers[:] = 0
    return numbers


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
