"""Sums of small arrays over the GPUs of one host, as one CUDA kernel that writes into the memory of the others.

A decode step of a divided model has two sums a layer, of a few kilobytes each. NCCL takes tens of microseconds of the
host for each, since MLX captures its launch into a graph of its own; this is a kernel as any other. Sums are float32 in
the order of ranks, rounded once: all ranks have the same bits. `sum_add_norm.py` is this with what follows in a layer.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import MIN_ON_DEVICE, VECTOR_BYTES, has_kernels, kernel
from parallm.model.kernels.driver import CudaError, call

logger = logging.getLogger(__name__)

THREADS = 128  # of a block
VECTORS = 1 << 17
"""Vectors of the largest sum: 128 rows of 8,192 numbers in 16 bits."""
TURNS = 4
"""Calls until the same words are written again."""
EMPTY = 0x80008000
"""The value of a quarter of a word until a rank has sent it. Counts of calls begin with this value, too."""
WARP = 32
HANDLE_BYTES = 64
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
ENABLE_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """Memory of all ranks that this one can write into. It exists until the process ends."""

    rank: int
    size: int
    addresses: mx.array
    """The address of each rank's part, uint64 (ranks or more,)."""


def fits(array: mx.array) -> bool:
    """Whether `all_sum` can sum an array."""
    size = array.nbytes
    return array.dtype in DTYPES and size % VECTOR_BYTES == 0 and size <= VECTORS * VECTOR_BYTES


def all_sum(array: mx.array, peers: PeerMemory) -> mx.array:
    """The sum of the arrays of all ranks, in their type. All ranks call it in the same order."""
    vectors = array.nbytes // VECTOR_BYTES
    sums: mx.array = kernel("all_sum", (("T", array.dtype), *defines_of(peers), ("THREADS", THREADS)))(
        [array, peers.addresses],
        [array.size],
        grid=(-(-vectors // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[array.shape],
        output_dtypes=[array.dtype],
    )[0]
    return sums


def defines_of(peers: PeerMemory) -> Defines:
    """The definitions that `peer_sum.cuh` is compiled with."""
    sizes = ("RANKS", peers.size), ("RANK", peers.rank), ("VECTORS", VECTORS)
    return *sizes, ("TURNS", TURNS), ("EMPTY", EMPTY)


def num_bytes(ranks: int) -> int:
    """Size of a rank's part: a word of each vector, and the count of calls of each warp's vectors."""
    return TURNS * ranks * VECTORS * VECTOR_BYTES + VECTORS // WARP * 4


def open_peer_memory(rank: int, size: int, gather: Callable[[bytes], Sequence[bytes]]) -> PeerMemory | None:
    """Allocate this rank's part and open those of the others; None, after a warning, if one of the GPUs cannot.

    `gather` returns the bytes that all ranks give, in the order of ranks. Device thread only.
    """
    addresses: list[int] = []
    try:
        mx.eval(mx.zeros(1))  # so that the device's context is that of MLX
        driver = _Driver()
        own = driver.allocate(num_bytes(size))
        handle = driver.handle(own) if has_kernels() else b""
    except (CudaError, OSError) as error:
        handle = _warned(error)
    handles = gather(handle)
    try:
        if all(handles):
            addresses = [own if other == rank else driver.open(one) for other, one in enumerate(handles)]
    except CudaError as error:
        _warned(error)
    # all parts are empty and open before a rank writes
    if not all(gather(b"open" if addresses else b"")):
        return None
    numbers = mx.array(addresses + [0] * (MIN_ON_DEVICE - size), mx.uint64)
    mx.eval(numbers)
    return PeerMemory(rank=rank, size=size, addresses=numbers)


def _warned(error: Exception) -> bytes:
    logger.warning("sums between GPUs go through NCCL, which takes longer: %s", error)
    return b""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Driver:
    """The calls of CUDA's driver that share memory between processes. They raise CudaError."""

    def __init__(self) -> None:
        """Raises OSError, too, where there is no driver."""
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        """The address of new memory of `size` bytes, a multiple of 4, all of them `EMPTY`."""
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        call("cuMemsetD32_v2", address, ctypes.c_uint(EMPTY), ctypes.c_size_t(size // 4))
        call("cuCtxSynchronize")
        return address.value

    def handle(self, address: int) -> bytes:
        """What another process opens the memory with."""
        handle = _Handle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory."""
        address = ctypes.c_uint64()
        structure = _Handle.from_buffer_copy(handle)
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, ctypes.c_uint(ENABLE_PEER_ACCESS))
        return address.value
