"""CUDA's driver (https://docs.nvidia.com/cuda/cuda-driver-api), for what MLX does not offer: page-locked memory, and
graphs of kernels that run again and again.

Calls belong to the context of the calling thread, which MLX makes. They keep Python's lock, because those of a step are
short.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx

NON_BLOCKING = 1  # of a stream
MAX_SHARED_ATTRIBUTE = 8  # of a function
WAIT_UNTIL_REACHED = 0
WRITE_AFTER_ALL = 0  # that was written before

PROGRAMMATIC = ctypes.c_uint64(0x010001)
"""A CUgraphEdgeData: its ports and its type, a byte each, of a programmatic dependency."""

Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float | ctypes.c_bool
Size3 = tuple[int, int, int]


class CudaError(RuntimeError):
    """The driver refused a call."""


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A launch of a kernel."""

    function: int
    blocks: Size3
    threads: Size3
    shared_bytes: int
    arguments: Sequence[Argument]
    begins_early: bool
    """Whether it may begin before the one in front has ended; see dependent.cuh."""

    def moved(self, places: Mapping[int, int]) -> "GraphNode":
        """The same with other addresses, by those of before."""

        def moved(argument: Argument) -> Argument:
            place = places.get(argument.value or 0) if isinstance(argument, ctypes.c_void_p) else None
            return argument if place is None else ctypes.c_void_p(place)

        return replace(self, arguments=list(map(moved, self.arguments)))


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises CudaError."""
    try:
        function = driver()[name]
    except AttributeError as error:
        raise CudaError(f"{name} is not part of this driver; CUDA 12.3 has it") from error
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'').decode() or f'error {status}'}")


@cache
def driver() -> ctypes.PyDLL:
    """Raises OSError."""
    return ctypes.PyDLL("libcuda.so.1")


def load_function(name: str, cubin: bytes, shared_bytes: int) -> int:
    """The handle of a function in machine code, whose blocks may have `shared_bytes`. Raises CudaError."""
    module = _created("cuModuleLoadData", cubin)
    function = _created("cuModuleGetFunction", ctypes.c_void_p(module), name.encode())
    if shared_bytes:  # MLX and CUDA count differently what needs to be asked for
        call("cuFuncSetAttribute", ctypes.c_void_p(function), MAX_SHARED_ATTRIBUTE, shared_bytes)
    return function


class Counter:
    """A word of 32 bits on the device that streams count up and wait for, in a circle."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        """Raises CudaError."""
        self.address = _created("cuMemAlloc_v2", ctypes.c_size_t(4))
        call("cuMemsetD32Async", ctypes.c_uint64(self.address), 0, ctypes.c_size_t(1), stream)
        call("cuStreamSynchronize", stream)
        self.expected = 0
        """The count after all that was launched."""

    def expect(self, more: int) -> ctypes.c_uint32:
        """Expect `more` additions; returns `expected`."""
        self.expected = (self.expected + more) % (1 << 32)
        return ctypes.c_uint32(self.expected)


class GraphStream:
    """A stream of its own for graphs. MLX does not tell its stream, so counters order both.

    Events for all work of the context would be simpler. But then a graph would wait for calls of the host, too, by
    which MLX frees memory; and no thread could capture a stream meanwhile.
    """

    def __init__(self) -> None:
        """Raises CudaError, also where streams cannot wait for memory."""
        mx.eval(mx.zeros(1))  # gives this thread a context
        self._stream = ctypes.c_void_p(_created("cuStreamCreate", NON_BLOCKING))
        self._renew_counters()
        self._wait(ctypes.c_uint32(0))
        call("cuStreamSynchronize", self._stream)

    def __del__(self) -> None:
        if stream := getattr(self, "_stream", None):
            driver().cuStreamDestroy_v2(stream)  # once all on it has ended; counters stay, which MLX may count up later

    def launch(self, graph: "Graph", arrivals: int) -> int:
        """Launch a graph after `arrivals` more additions of 1 to that counter, which are launched already; returns the
        count of `graphs` after this one. Raises CudaError."""
        self._wait(self.arrivals.expect(arrivals))
        call("cuGraphLaunch", graph.executable, self._stream)
        address, ended = ctypes.c_uint64(self.graphs.address), self.graphs.expect(1)
        call("cuStreamWriteValue32_v2", self._stream, address, ended, WRITE_AFTER_ALL)
        return self.graphs.expected

    def reset(self) -> None:
        """Wait for all graphs, and take new counters: after an error, additions that no graph awaits may still come to
        the old ones. Raises CudaError."""
        call("cuStreamSynchronize", self._stream)
        self._renew_counters()

    def _wait(self, arrivals: ctypes.c_uint32) -> None:
        address = ctypes.c_uint64(self.arrivals.address)
        call("cuStreamWaitValue32_v2", self._stream, address, arrivals, WAIT_UNTIL_REACHED)

    def _renew_counters(self) -> None:
        self.arrivals, self.graphs = Counter(self._stream), Counter(self._stream)
        """The copies of inputs, for which graphs wait, and the graphs that have ended."""


class Graph:
    """Kernels that run one after the other."""

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        """Raises CudaError."""
        graph = ctypes.c_void_p(_created("cuGraphCreate", 0))
        self._graph = graph
        last: ctypes.c_void_p | None = None
        for node in nodes:
            addresses = [ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in node.arguments]
            arguments = (ctypes.c_void_p * len(addresses))(*addresses)
            params = _NodeParams(
                function=node.function,
                grid=node.blocks,
                block=node.threads,
                shared_bytes=node.shared_bytes,
                arguments=arguments,
            )
            added = _created("cuGraphAddKernelNode_v2", graph, None, ctypes.c_size_t(0), ctypes.byref(params))
            before, last = last, ctypes.c_void_p(added)
            if before is not None:
                edge = PROGRAMMATIC if node.begins_early else ctypes.c_uint64(0)
                ends = ctypes.byref(before), ctypes.byref(last)
                call("cuGraphAddDependencies_v2", graph, *ends, ctypes.byref(edge), ctypes.c_size_t(1))
        self.executable = ctypes.c_void_p(_created("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0)))

    def __del__(self) -> None:
        if executable := getattr(self, "executable", None):
            driver().cuGraphExecDestroy(executable)
        if graph := getattr(self, "_graph", None):
            driver().cuGraphDestroy(graph)


def _created(name: str, *arguments: Any) -> int:
    """Call a function of the driver that creates a handle; returns the handle. Raises CudaError."""
    created = ctypes.c_void_p()
    call(name, ctypes.byref(created), *arguments)
    return created.value or 0
