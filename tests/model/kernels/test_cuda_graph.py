"""Captured forwards: what is launched again, where, and what cannot be captured. Kernels are functions of NumPy here
that work on addresses; on CUDA a real forward is replayed."""

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import cuda, cuda_graph
from parallm.model.kernels.columns import shaped
from parallm.model.kernels.copy_into import copy_into
from parallm.model.kernels.cuda import Kernel, Launch, has_kernels
from parallm.model.kernels.cuda_graph import (
    VIEWS,
    Arena,
    Capture,
    NotCaptured,
    Output,
    RanLaunches,
    capture,
    share_memory,
)
from parallm.model.kernels.driver import Graph, GraphStream
from parallm.model.kernels.swiglu import fused_swiglu
from parallm.model.kernels.wait_until import wait_until

SIZE = 64
Function = Callable[[Sequence[np.ndarray], np.ndarray, Sequence[Any]], None]


def add(inputs: Sequence[np.ndarray], output: np.ndarray, scalars: Sequence[Any]) -> None:
    output[...] = inputs[0] + inputs[1][: len(output)] + sum(scalars)


def double(inputs: Sequence[np.ndarray], output: np.ndarray, _: Sequence[Any]) -> None:
    output[...] = 2 * inputs[0]


FUNCTIONS: dict[str, tuple[Function, int]] = {"add": (add, 2), "double": (double, 1)}


KERNELS = {name: Kernel(name, b"", 0, copies_views=True) for name in FUNCTIONS}


ZEROS = mx.array([0.0] * SIZE)
COUNT = itertools.count()
OWN = {"Subtract", "Negative", "Multiply", "Broadcast"}


def launch(name: str, *inputs: mx.array, scalars: Sequence[Any] = ()) -> mx.array:
    """Build what a function gives for float32 numbers, and note it as launches are noted. Operations of MLX, those in
    `OWN`, stand for the kernel."""
    first, *others = (array.reshape(-1) for array in inputs)
    if name == "add":
        output = mx.subtract(first, mx.subtract(mx.negative(others[0][: first.size]), float(sum(scalars))))
    else:
        output = mx.multiply(first, 2.0)
    captured = cuda._captured.get()
    if captured is not None:
        captured.append(Launch(KERNELS[name], inputs, [output], scalars, (SIZE, 1, 1), (SIZE, 1, 1)))
    return output


def replay(captured: Capture) -> None:
    for node in captured.nodes:
        function, count = FUNCTIONS[list(FUNCTIONS)[node.function]]
        *pointers, last = node.arguments[: count + 1]
        arrays = [memory(pointer) for pointer in (*pointers, last)]
        function(arrays[:-1], arrays[-1], [one.value for one in node.arguments[count + 1 :]])


def memory(pointer: Any) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(pointer.value))


def addresses(arrays: Sequence[mx.array]) -> list[int | None]:
    mx.eval(arrays)
    views = [np.asarray(array) for array in arrays]
    return [view.ctypes.data if view.flags.c_contiguous else None for view in views]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.node.name:
        monkeypatch.setattr(cuda_graph, "VIEWS", VIEWS | OWN)
        monkeypatch.setattr(cuda_graph, "addresses", addresses)
        monkeypatch.setattr(cuda_graph, "_function", lambda kernel: list(FUNCTIONS).index(kernel.name))
        monkeypatch.setattr(cuda_graph, "_overlap", lambda name: (name == "add", False))


@pytest.fixture
def given() -> mx.array:
    array = mx.random.normal((SIZE,))
    mx.eval(array)
    return array


def chain(given: mx.array) -> mx.array:
    """2 (x + 3) + x + (x + 3), with a launch that nobody needs and a view."""
    first = launch("add", given, ZEROS, scalars=[3])
    launch("double", first)
    doubled = launch("double", first.reshape(8, -1))
    return shaped(launch("add", launch("add", doubled, given), first), (1, SIZE))


def test_what_is_replayed_reads_inputs_anew(given: mx.array) -> None:
    captured = capture(lambda: chain(given), Arena())
    assert len(captured.nodes) == 4, "a result that nobody reads"
    before = np.asarray(captured.result).copy()
    np.asarray(given)[...] = np.arange(SIZE)
    replay(captured)
    expected = 4 * np.arange(SIZE) + 9
    assert np.array_equal(np.asarray(captured.result), expected)
    assert not np.array_equal(before, expected)


def test_what_the_result_does_not_need_is_not_run(given: mx.array, monkeypatch: pytest.MonkeyPatch) -> None:
    needless, evaluated = list[mx.array](), set[int]()

    def forward() -> mx.array:
        needless.append(launch("add", launch("double", given), ZEROS))
        return launch("double", given)

    def noted(arrays: Sequence[mx.array]) -> list[int | None]:
        evaluated.update(map(id, arrays))
        return addresses(arrays)

    monkeypatch.setattr(cuda_graph, "addresses", noted)
    captured = capture(forward, Arena())
    assert len(captured.nodes) == 1
    assert len(needless) == 2
    assert evaluated.isdisjoint(map(id, needless)), "a sum over all ranks, say, would have to run at each of them"


def test_what_lies_between_shares_memory(given: mx.array) -> None:
    arena = Arena()

    def forward() -> mx.array:
        x = given
        for _ in range(20):
            x = launch("double", x)
        return x

    captured = capture(forward, arena)
    replay(captured)
    assert np.allclose(np.asarray(captured.result), 2.0**20 * np.asarray(given))
    assert arena.memory(1).nbytes == 512, "two outputs at a time"
    assert arena.memory(513).nbytes == 1024


def test_moved_pointers_read_another_array(given: mx.array) -> None:
    captured, other = capture(lambda: launch("double", given), Arena(), given=[]), mx.ones(SIZE)
    (here,), (there,) = addresses([given]), addresses([other])
    assert here
    assert there
    replay(captured.moved({here: there}))
    assert np.array_equal(np.asarray(captured.result), np.full(SIZE, 2.0))
    assert any(array is given for array in captured.kept)
    assert not any(array is given for array in capture(lambda: launch("double", given), Arena(), given=[here]).kept)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: launch("double", x) + 1, "MLX computes Add"),
        (lambda x: launch("double", launch("double", x).reshape(2, -1).T), "one after the other"),
        (lambda x: launch("double", launch("double", x).reshape(2, -1).T.reshape(-1)), "made anew"),
        (lambda x: launch("double", launch("double", x).reshape(8, 8).T.flatten()), "made anew"),
        (lambda x: launch("add", x, ZEROS, scalars=[next(COUNT)]), "made anew"),
        (lambda x: launch("double", mx.array(np.array(launch("double", x)))), "made anew"),
        (lambda x: launch("double", x)[:8], "nothing else"),
        (lambda x: x, "nothing else"),
    ],
)
def test_what_other_operations_compute_is_not_captured(
    forward: Callable[[mx.array], mx.array], reason: str, given: mx.array
) -> None:
    with pytest.raises(NotCaptured, match=reason):
        capture(lambda: forward(given), Arena())


class Ran(RanLaunches):
    """Launches that have outputs of some sizes and no arrays."""

    def __init__(self, outputs: list[list[Output]]) -> None:
        self.outputs = outputs


@pytest.mark.parametrize("lives_long_enough", [True, False])
def test_outputs_that_are_needed_together_do_not_overlap(lives_long_enough: bool) -> None:
    """The control lets outputs end before they are read."""
    generator = random.Random(1)
    sizes = [[generator.randrange(1, 5000) for _ in range(generator.randrange(1, 4))] for _ in range(60)]
    ran = Ran([[Output(index, 0, size) for size in of_one] for index, of_one in enumerate(sizes)])
    last = ran.outputs[-1][-1]
    readers = {
        output: index + generator.randrange(0, 12)
        for index, outputs in enumerate(ran.outputs)
        for output in outputs
        if output is not last
    }
    readers[last] = len(sizes)
    shorter = {output: reader if lives_long_enough else output.launch for output, reader in readers.items()}
    offsets, size = share_memory(ran, last, shorter)
    assert offsets.keys() == readers.keys() - {last}
    overlaps = [
        (one, other)
        for one in offsets
        for other in offsets
        if one is not other
        and one.launch <= other.launch <= readers[one]
        and offsets[one] < offsets[other] + other.size
        and offsets[other] < offsets[one] + one.size
    ]
    assert bool(overlaps) != lives_long_enough
    assert max(offsets[output] + output.size for output in offsets) == size
    assert size < sum(map(sum, sizes)) / 2


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
def test_a_gpu_runs_a_graph_in_order_with_mlx() -> None:
    x, gate = mx.random.normal((64, 64)), mx.random.normal((64, 64))
    mx.eval(x, gate)

    def forward(x: mx.array) -> mx.array:
        for _ in range(11):
            x = fused_swiglu(gate, x)
        return x

    captured, stream = capture(lambda: forward(x), Arena()), GraphStream()
    graph = Graph(captured.nodes)
    assert len(captured.nodes) == 11
    for number in range(20):
        fresh = mx.random.normal((64, 64), key=mx.random.key(number))
        done, arrivals = copy_into([x], [fresh], stream.arrivals.address)
        mx.async_eval(done)
        mx.async_eval(wait_until(stream.graphs.address, stream.launch(graph, arrivals)))
        assert mx.array_equal(captured.result, forward(fresh)).item()
