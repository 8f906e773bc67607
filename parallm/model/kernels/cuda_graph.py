"""A forward that is captured once and replayed with one call, as a CUDA graph.

MLX hands kernels over one by one, which costs the host of a small model as much as computing them costs the GPU. A
captured forward costs the host the same for any number of kernels.

Only launches of our own kernels are captured, so nothing else may be computed; views cost nothing. Inputs, weights and
the result stay where they are: the host must not read them while there are graphs, since MLX then moves an array. What
lies between shares one array, in which an output takes the place of one that is not read any more.
"""

import ctypes
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from parallm.model.kernels.addresses import addresses
from parallm.model.kernels.columns import memory_of
from parallm.model.kernels.compiler import cubin, source_of
from parallm.model.kernels.cuda import Kernel, Launch, architecture, captured_launches, target
from parallm.model.kernels.driver import Argument, GraphNode, load_function

VIEWS = frozenset({"ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unflatten"})
VIEWS |= {"CustomTransforms", "StopGradient"}  # of functions that have a gradient of ours
KERNEL = "CustomKernel"
LABEL = re.compile(r'(\d+) \[label ="([^"]*)"')
EDGE = re.compile(r'"?(\w+)"? -> "?(\w+)"?')
PREFIX, LAST = "some", "last"
"""Names of arrays; MLX gives others capital letters, and operations numbers."""
ALIGNMENT = 256  # bytes
WAITS = "wait_for_inputs();"
BEGINS_EARLY = "bool begins_early) {"
"""The last parameter of kernels that fetch weights before they wait; MLX's launches say no, because nothing is gained
where the kernel in front has ended."""
FIRST_TO_OVERLAP = 90  # compute capability whose kernels may begin early


class NotCaptured(Exception):
    """A forward computes something outside of our kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A forward as kernels that can be launched again."""

    nodes: Sequence[GraphNode]
    result: mx.array
    """The hidden states or other numbers of the forward, perhaps in another shape."""
    kept: Sequence[mx.array]
    """All other arrays that the kernels read or write, but for those that the caller keeps."""

    def moved(self, places: Mapping[int, int]) -> "Capture":
        """The same for arrays that begin at other addresses: by those of before."""
        return replace(self, nodes=[node.moved(places) for node in self.nodes])


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Memory that a launch has written."""

    launch: int
    start: int
    """Its address."""
    size: int
    """Bytes."""


class Arena:
    """Memory of all captured forwards of which one runs at a time."""

    def __init__(self) -> None:
        self._array = mx.zeros(0, mx.uint8)

    def memory(self, size: int) -> mx.array:
        """An array of at least `size` bytes, the same for all sizes that it has."""
        if self._array.size < size:
            self._array = mx.zeros(1 << (size - 1).bit_length(), mx.uint8)
        return self._array


def capture(forward: Callable[[], mx.array], arena: Arena, given: Collection[int] = ()) -> Capture:
    """The launches that compute `forward()`, which runs twice, and alike. `given` are addresses of arrays that the
    caller keeps. Raises NotCaptured."""
    ran, again = RanLaunches(forward), RanLaunches(forward)
    last = ran.output_at(ran.computed)
    if last is None or last.size != ran.computed.nbytes:
        raise NotCaptured("no kernel writes the result and nothing else")
    if ran.constants() != again.constants():
        raise NotCaptured("a kernel reads what was made anew outside of our kernels, such as a copy of a view")
    offsets, size = share_memory(ran, last, ran.last_readers(last))
    memory, result = arena.memory(max(1, size)), mx.zeros(ran.computed.shape, ran.computed.dtype)
    base, result_address = (address or 0 for address in addresses([memory, result]))
    starts = {output: base + offset for output, offset in offsets.items()} | {last: result_address}
    nodes = [_node(one, [ran.moved(array, starts) for array in (*one.inputs, *one.outputs)]) for one in ran.launches]
    kept = [array for one in ran.launches for array in ran.constant_inputs(one) if ran.address(array) not in given]
    return Capture(nodes=nodes, result=result, kept=[memory, *{id(array): array for array in kept}.values()])


class RanLaunches:
    """The launches of a forward that has run, and the places that MLX gave to their arrays."""

    def __init__(self, forward: Callable[[], mx.array]) -> None:
        """Raises NotCaptured."""
        with captured_launches() as launches:
            self.computed = memory_of(forward())
        needed = needed_for(self.computed, [array for one in launches for array in one.outputs])
        if others := needed.operations - VIEWS - {KERNEL}:
            raise NotCaptured(f"MLX computes {', '.join(sorted(others))}")
        self.launches: Sequence[Launch] = [
            one for one in launches if not needed.arrays.isdisjoint(map(id, one.outputs))
        ]
        """Those that the result needs, which alone have run."""
        arrays = {id(array): array for one in self.launches for array in (*one.inputs, *one.outputs)}
        arrays[id(self.computed)] = self.computed
        self._address_of = dict(zip(arrays, addresses(list(arrays.values())), strict=True))
        self.outputs = [
            [Output(index, self.address(array), array.nbytes) for array in one.outputs]
            for index, one in enumerate(self.launches)
        ]
        self._sorted = sorted((one for outputs in self.outputs for one in outputs), key=lambda output: output.start)
        self._starts = [output.start for output in self._sorted]

    def constant_inputs(self, launch: Launch) -> list[mx.array]:
        """The inputs of a launch that no launch has written."""
        return [array for array in launch.inputs if self.output_at(array) is None]

    def constants(self) -> list[object]:
        """The kernels, scalars, and addresses of inputs that no launch has written: alike in each run of a forward that
        can be captured."""
        return [
            (one.kernel, list(one.scalars), one.grid, [self.address(array) for array in self.constant_inputs(one)])
            for one in self.launches
        ]

    def address(self, array: mx.array) -> int:
        """Raises NotCaptured."""
        address = self._address_of[id(array)]
        if address is None:
            raise NotCaptured("a kernel reads an array whose numbers do not lie one after the other")
        return address

    def output_at(self, array: mx.array) -> Output | None:
        """The output that an array is, or is a view of."""
        address = self.address(array)
        index = bisect_right(self._starts, address) - 1
        output = self._sorted[index] if index >= 0 else None
        return output if output is not None and address < output.start + output.size else None

    def last_readers(self, last: Output) -> dict[Output, int]:
        """All outputs, each with the index of the launch that reads it last, or that wrote it if none reads it. The
        caller reads `last` after all launches."""
        readers = {output: index for index, outputs in enumerate(self.outputs) for output in outputs}
        for index, one in enumerate(self.launches):
            readers |= {output: index for array in one.inputs if (output := self.output_at(array))}
        return readers | {last: len(self.launches)}

    def moved(self, array: mx.array, starts: Mapping[Output, int]) -> int:
        """The address of an array if outputs begin at `starts`."""
        output = self.output_at(array)
        return self.address(array) if output is None else self.address(array) - output.start + starts[output]


def share_memory(ran: RanLaunches, last: Output, last_reader: Mapping[Output, int]) -> tuple[dict[Output, int], int]:
    """The starts of all outputs but `last` in one array, and its size in bytes: those that are needed at the same time
    do not overlap."""
    offsets: dict[Output, int] = {}
    taken: dict[Output, int] = {}  # where it ends
    size = 0
    for index, outputs in enumerate(ran.outputs):
        for output in outputs:
            if output is last:
                continue
            start = 0
            for other in sorted(taken, key=offsets.__getitem__):
                if start + output.size <= offsets[other]:
                    break
                start = -(-taken[other] // ALIGNMENT) * ALIGNMENT
            offsets[output], taken[output] = start, start + output.size
            size = max(size, start + output.size)
        taken = {output: end for output, end in taken.items() if last_reader[output] != index}
    return offsets, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The arrays and operations that a result depends on; see `needed_for`."""

    arrays: frozenset[int]
    """The `id` of each array in question that is needed."""
    operations: frozenset[str]
    """The names of the operations that are."""


def needed_for(result: mx.array, arrays: Sequence[mx.array]) -> Needed:
    """Find which of `arrays` MLX needs for `result`, none of which is evaluated, and by which operations."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), **{f"{PREFIX}{index}": one for index, one in enumerate(arrays)}, **{LAST: result})
        text = path.read_text()
    before = defaultdict[str, list[str]](list)
    for source, reader in EDGE.findall(text):
        before[reader].append(source)
    found, waiting = set[str](), [LAST]
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += before[node]
    return Needed(
        arrays=frozenset(id(one) for index, one in enumerate(arrays) if one is result or f"{PREFIX}{index}" in found),
        operations=frozenset(label for node, label in LABEL.findall(text) if node in found),
    )


def _node(launch: Launch, places: Sequence[int]) -> GraphNode:
    (x, y, z), (threads_x, threads_y, threads_z) = launch.grid, launch.threadgroup
    begins_early, has_flag = _overlap(launch.kernel.name)
    scalars = [*launch.scalars[:-1], True] if has_flag else launch.scalars
    return GraphNode(
        function=_function(launch.kernel),
        blocks=(-(-x // threads_x), -(-y // threads_y), -(-z // threads_z)),
        threads=(min(x, threads_x), min(y, threads_y), min(z, threads_z)),
        shared_bytes=launch.kernel.shared_memory,
        arguments=[*map(ctypes.c_void_p, places), *map(_argument, scalars)],
        begins_early=begins_early,
    )


def _argument(scalar: bool | int | float) -> Argument:
    match scalar:
        case bool():
            return ctypes.c_bool(scalar)
        case int():
            return ctypes.c_int32(scalar)
        case _:
            return ctypes.c_float(scalar)


@cache
def _overlap(name: str) -> tuple[bool, bool]:
    """Whether a kernel may begin before the one in front has ended, on this GPU, and whether it wants to know that."""
    source = source_of(name) if int(architecture().removeprefix("sm_")) >= FIRST_TO_OVERLAP else ""
    return WAITS in source, BEGINS_EARLY in source


@cache
def _function(of: Kernel) -> int:
    return load_function(of.name, cubin(of.name, of.defines, target()), of.shared_memory)
