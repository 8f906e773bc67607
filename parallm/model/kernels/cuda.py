"""CUDA kernels of our own: a `.cu` file beside this module becomes a function of MLX's CUDA build.

Each kernel has one Python face in this folder, which alone calls `kernel`; other devices compute the same with MLX's
operations. A `.cu` file holds a whole function of its own name. Its parameters are the inputs, the outputs and the
scalars of a call in their order; what the compiler has to know are macros (`compiler.py`).
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx

from parallm.model.kernels import host_memory
from parallm.model.kernels.columns import memory_of
from parallm.model.kernels.compiler import CompileError, Defines, NoCompiler, Specialization, cubin
from parallm.model.kernels.driver import Size3
from parallm.model.kernels.module_cache import put_module

Number = int | float

VECTOR_BYTES = 16  # what a thread reads at once, `Pack` in pack.cuh
MIN_ON_DEVICE = 3  # numbers of 32 bits: MLX keeps arrays of 8 bytes and less in the host's memory, far from kernels
MAX_INTERNED = 512
UPLOAD_THREADS, MAX_UPLOAD_BLOCKS = 256, 64
OLDEST = 80  # architecture whose instructions the kernels use
MAX_SHARED_KIBIBYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227}
"""The shared memory that a block may have, by architecture; 99 in others."""
PROBE: Defines = (("T", mx.float32), ("HALVES", False))  # of the kernel that shows whether any runs
THREADS_OF_PROBE = 32

logger = logging.getLogger(__name__)
_listed: ContextVar[dict[Specialization, None] | None] = ContextVar("listed", default=None)
_captured: ContextVar["list[Launch] | None"] = ContextVar("captured", default=None)


def on_cuda() -> bool:
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


@cache
def architecture() -> str:
    """The GPU's, such as sm_90."""
    return str(mx.device_info()["architecture"])


def max_shared_bytes() -> int:
    """Shared memory that a block may have."""
    return 1024 * MAX_SHARED_KIBIBYTES.get(int(architecture().removeprefix("sm_")), 99)


def has_kernels() -> bool:
    """Whether the kernels run on this device; other devices compute the same with MLX's operations."""
    return on_cuda() and _compiles()


@cache
def _compiles() -> bool:
    """Whether this GPU's machine code can be made here; if not, a warning says why."""
    try:
        if int(architecture().removeprefix("sm_")) >= OLDEST:
            cubin("swiglu", PROBE, target())
            return True
        reason: object = f"they need compute capability 8.0, this GPU is {architecture()}"
    except (NoCompiler, CompileError) as error:
        reason = error
    logger.warning("MLX's operations stand in for the CUDA kernels of ParaLLM, and take longer: %s", reason)
    return False


def target() -> str:
    """The architecture that machine code is made for; as MLX, with what only this one has from Hopper on."""
    return architecture() + ("a" if int(architecture().removeprefix("sm_")) >= 90 else "")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function in machine code, with all its macros."""

    name: str
    code: bytes | None
    """The cubin, or the text that stands for it (`module_cache.py`). None where kernels are only listed
    (`listed_kernels`): the outputs are zeros."""
    shared_memory: int
    copies_views: bool
    defines: Defines = ()

    def __call__(
        self,
        inputs: Sequence[mx.array],
        scalars: Sequence[Number] = (),
        *,
        grid: Size3,
        threadgroup: Size3,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """The outputs, lazily. `grid` counts threads; scalars are bool, int32 or float32. The kernel reads inputs
        where they are (`columns.py`)."""
        if self.code is None:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        arrays, numbers = list(map(memory_of, inputs)), list(map(_as_scalar, scalars))
        outputs: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=self.name,
            compiled_source=self.code,
            inputs=arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=numbers,
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.shared_memory,
            ensure_row_contiguous=self.copies_views,
        )
        if (captured := _captured.get()) is not None:
            captured.append(Launch(self, arrays, outputs, numbers, grid, threadgroup))
        return outputs


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a kernel."""

    kernel: Kernel
    inputs: Sequence[mx.array]
    outputs: Sequence[mx.array]
    scalars: Sequence[Number]
    grid: Size3
    """Threads."""
    threadgroup: Size3


def kernel(name: str, defines: Defines = (), *, shared_memory: int = 0, copies_views: bool = True) -> Kernel:
    """The function in `{name}.cu` with these macros, from the cache on disk or compiled now.

    `shared_memory` is the size of `extern __shared__` in bytes: one for the same macros, because MLX sets it once.
    With `copies_views` an input that is not contiguous is copied before the launch.
    """
    listed = _listed.get()
    if listed is None:
        return _kernel(name, defines, shared_memory, copies_views)
    listed[name, defines] = None
    return Kernel(name, None, shared_memory, copies_views, defines)


@cache
def _kernel(name: str, defines: Defines, shared_memory: int, copies_views: bool) -> Kernel:
    code = cubin(name, defines, target())
    token = put_module(name, code) if _finds_modules() else None
    return Kernel(name, token or code, shared_memory, copies_views, defines)


@cache
def _finds_modules() -> bool:
    """Whether MLX takes code from its cache on disk: a launch with nothing but the text shows it."""
    token = put_module("swiglu", cubin("swiglu", PROBE, target()))
    if token is None:
        return False
    ones = mx.ones((THREADS_OF_PROBE * VECTOR_BYTES // 4,))
    sizes = {"grid": (THREADS_OF_PROBE, 1, 1), "threadgroup": (THREADS_OF_PROBE, 1, 1)}
    captured = _captured.set(None)  # this launch is no part of the forward that is being captured
    try:
        outputs = Kernel("swiglu", token, 0, True)(
            [ones, ones], [ones.size], **sizes, output_shapes=[ones.shape], output_dtypes=[ones.dtype]
        )
        return mx.allclose(outputs[0], mx.sigmoid(ones)).item()
    except RuntimeError as error:
        logger.warning("kernels take longer to launch, since MLX does not find their code on disk: %s", error)
        return False
    finally:
        _captured.reset(captured)


@contextmanager
def listed_kernels() -> Iterator[dict[Specialization, None]]:
    """The kernels that are asked for inside the block, in their order; none is compiled, and none runs.

    Whoever builds the graph of a forward inside finds out what it needs: MLX is lazy, so nothing is computed.
    """
    listed: dict[Specialization, None] = {}
    token = _listed.set(listed)
    try:
        yield listed
    finally:
        _listed.reset(token)


def is_capturing() -> bool:
    """Whether launches are captured, so that a forward should consist of them."""
    return _captured.get() is not None


@contextmanager
def captured_launches() -> Iterator[list[Launch]]:
    """The launches that are built inside the block, in their order. They run as always, once they are evaluated."""
    captured: list[Launch] = []
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


def _as_scalar(number: Number) -> Number:
    """The nearest number that MLX takes as a scalar."""
    if not isinstance(number, float):
        return number
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


@lru_cache(MAX_INTERNED)
def interned_array(numbers: tuple[Number, ...] | tuple[tuple[Number, ...], ...], dtype: mx.Dtype) -> mx.array:
    """`mx.array` of these numbers, the same array for the same numbers; it must not be written into.

    A GPU fetches what the host has written page by page when a kernel first reads it, and MLX's CUDA build may copy a
    page from the device before the host can write it. A step mostly needs numbers that an earlier step needed too, such
    as the temperatures of as many rows.
    """
    return mx.array(numbers, dtype)


def uploaded(numbers: host_memory.Numbers) -> mx.array:
    """The same numbers on the device, int32 or float32: for numbers that a step needs once.

    Not for use inside a function that MLX compiles, which would copy from the same memory again when other numbers are
    there. Raises MemoryError.
    """
    if not has_kernels() or not numbers.size:
        return mx.array(numbers)
    dtype = getattr(mx, numbers.dtype.name)
    fetch = kernel("from_host", (("T", dtype),))
    if _listed.get() is not None:
        return mx.zeros(numbers.shape, dtype)
    blocks = min(MAX_UPLOAD_BLOCKS, -(-numbers.size // UPLOAD_THREADS))

    def copy(memory: host_memory.Memory) -> mx.array:
        (array,) = fetch(
            [],
            [numbers.size, *host_memory.halves(memory)],
            grid=(blocks * UPLOAD_THREADS, 1, 1),
            threadgroup=(UPLOAD_THREADS, 1, 1),
            output_shapes=[numbers.shape],
            output_dtypes=[dtype],
        )
        return array

    return host_memory.copied(numbers, copy)
