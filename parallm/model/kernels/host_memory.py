"""Page-locked memory of the host, which kernels read and write where it is.

MLX keeps what the host writes or reads in managed memory, whose pages move to the side that touches them: a kernel of a
decode step waits 0.15 ms for one on an H200. And where a new array takes memory that was the device's, MLX copies it
and may wait for all that the device computes. Page-locked memory stays where it is. MLX does not know it, so a kernel
gets its address as two scalars. Without a GPU the memory is ordinary.

Launches of one thread run in order, on one stream: memory serves the launches of a thread one after the other.
"""

import ctypes
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.driver import CudaError, call

PORTABLE, DEVICE_MAP = 1, 2  # of cuMemHostAlloc
MIN_NUMBERS = 256
SLAB = 1 << 18
"""Numbers that are locked at once: the driver takes long for each time."""
UPLOADS = 16
"""Uploads of about one size before memory is used again, more than the steps in flight have."""

Memory = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class HostMemory(threading.local):
    """The memory of a thread. Nothing is given back, because a kernel may still use it."""

    def __init__(self) -> None:
        self.of_results: defaultdict[int, list[Memory]] = defaultdict(list)
        """Free memory for results, by size."""
        self.of_uploads: defaultdict[int, deque[tuple[Memory, mx.array]]] = defaultdict(deque)
        """Memory and the arrays that are copied from it, the oldest first, by size."""
        self._slab: Memory = np.empty(0, np.int32)

    def allocate(self, size: int) -> Memory:
        """New memory for `size` numbers. Raises MemoryError."""
        if size > len(self._slab):
            self._slab = _page_locked(max(size, SLAB))
        memory, self._slab = self._slab[:size], self._slab[size:]
        return memory


_memory = HostMemory()


def copied(numbers: Numbers, copy: Callable[[Memory], mx.array]) -> mx.array:
    """The result of `copy`, a lazy array, of memory that holds these numbers until the result is evaluated.

    May wait for an earlier copy from the same memory. Raises MemoryError.
    """
    size = _size_for(numbers.size)
    uploads = _memory.of_uploads[size]
    if len(uploads) < UPLOADS:
        memory = _memory.allocate(size)
    else:
        memory, before = uploads.popleft()
        mx.eval(before)
    memory[: numbers.size] = numbers.reshape(-1).view(np.int32)
    result = copy(memory)
    uploads.append((memory, result))
    return result


class HostResult:
    """Numbers that a kernel writes for the host. They are there once an output of the same launch is evaluated."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Raises MemoryError."""
        self._shape = shape
        size = _size_for(math.prod(shape))
        free = _memory.of_results[size]
        self._numbers = free.pop() if free else _memory.allocate(size)
        # The launch of an unread result may still be pending; it precedes the launch of the memory's next owner
        weakref.finalize(self, free.append, self._numbers)

    def halves(self) -> tuple[int, int]:
        return halves(self._numbers)

    def read(self) -> Memory:
        """A copy."""
        return self._numbers[: math.prod(self._shape)].reshape(self._shape).copy()


def halves(memory: Memory) -> tuple[int, int]:
    """The address, its lower 32 bits first, as kernels take it."""
    low, high = np.array([memory.ctypes.data], np.uint64).view(np.int32).tolist()
    return low, high


def _size_for(count: int) -> int:
    return max(MIN_NUMBERS, 1 << max(count - 1, 0).bit_length())


def _page_locked(size: int) -> Memory:
    if not mx.cuda.is_available():
        return np.zeros(size, np.int32)
    mx.eval(mx.zeros(1))  # gives this thread a context of CUDA
    pointer = ctypes.c_void_p()
    try:
        call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(4 * size), PORTABLE | DEVICE_MAP)
    except CudaError as error:
        raise MemoryError(f"CUDA gives no page-locked memory for {4 * size} bytes: {error}") from error
    assert pointer.value is not None
    numbers = np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(pointer.value))
    numbers[:] = 0
    return numbers
