"""Calls of CUDA's driver: in which order graphs are launched, and how their kernels follow each other."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from parallm.model.kernels import driver as module
from parallm.model.kernels.driver import Argument, CudaError, Graph, GraphNode, GraphStream, load_function


class Driver:
    """Stands in for the library: notes names and numbers, and makes handles."""

    def __init__(self) -> None:
        self.called: list[tuple[str, list[Any]]] = []
        self.refused: set[str] = set()
        self._last = 0

    def __getitem__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            given = [getattr(one, "value", None) for one in arguments]
            self.called.append((name, given))
            if name in self.refused:
                return 801
            if name.startswith(("cuStreamCreate", "cuMemAlloc", "cuGraph", "cuModule")):
                self._make(name, arguments)
            return 0

        return call

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def _make(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuGraphAddDependencies_v2":
            self.called[-1] = name, [arguments[3]._obj.value]
        elif name != "cuGraphLaunch" and hasattr(arguments[0], "_obj"):
            self._last += 1
            arguments[0]._obj.value = self._last

    def names(self) -> list[str]:
        return [name for name, _ in self.called]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(module, "driver", lambda: made)
    return made


def node(*, begins_early: bool) -> GraphNode:
    arguments: list[Argument] = [ctypes.c_void_p(7), ctypes.c_int32(8)]
    return GraphNode(
        function=5,
        blocks=(2, 1, 1),
        threads=(64, 1, 1),
        shared_bytes=0,
        arguments=arguments,
        begins_early=begins_early,
    )


def test_a_graph_waits_for_all_arrivals_and_counts_its_end(driver: Driver) -> None:
    stream, graph = GraphStream(), Graph([node(begins_early=False)])
    assert driver.names().count("cuStreamWaitValue32_v2") == 1, "whether streams can wait"
    driver.called.clear()
    ended = [stream.launch(graph, 3), stream.launch(graph, 4)]
    assert driver.names() == ["cuStreamWaitValue32_v2", "cuGraphLaunch", "cuStreamWriteValue32_v2"] * 2
    assert [given[1:3] for _, given in driver.called[::3]] == [
        [stream.arrivals.address, 3],
        [stream.arrivals.address, 7],
    ]
    assert [given[1:3] for _, given in driver.called[2::3]] == [[stream.graphs.address, 1], [stream.graphs.address, 2]]
    assert ended == [1, 2]
    stream.launch(graph, (1 << 32) - 6)
    assert driver.called[-3][1][2] == 1, "a counter is a circle"
    before = stream.arrivals.address
    stream.reset()
    assert stream.launch(graph, 2) == 1
    assert driver.called[-3][1][1:3] == [stream.arrivals.address, 2]
    assert stream.arrivals.address != before, "what is launched late counts elsewhere"


def test_only_a_kernel_that_waits_begins_before_the_one_in_front_ends(driver: Driver) -> None:
    Graph([node(begins_early=early) for early in (True, False, True)])
    edges = [given for name, given in driver.called if name == "cuGraphAddDependencies_v2"]
    programmatic = bytes(ctypes.c_uint64(edges[1][0]))
    assert edges[0] == [0]
    assert programmatic == bytes([1, 0, 1, 0, 0, 0, 0, 0]), "from the port of the launch, of programmatic type"


def test_an_old_driver_and_a_refused_call_are_told(driver: Driver) -> None:
    driver.refused.add("cuGraphInstantiateWithFlags")
    with pytest.raises(CudaError, match="cuGraphInstantiateWithFlags: error 801"):
        Graph([])


def test_streams_that_cannot_wait_are_told_at_once(driver: Driver) -> None:
    driver.refused.add("cuStreamWaitValue32_v2")
    with pytest.raises(CudaError, match="cuStreamWaitValue32_v2"):
        GraphStream()


def test_a_function_that_the_driver_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "driver", lambda: ctypes.PyDLL(None))
    with pytest.raises(CudaError, match=r"cuGraphCreate is not part of this driver; CUDA 12\.3 has it"):
        Graph([])


@pytest.mark.parametrize("shared_bytes", [0, 1024, 48 << 10])
def test_a_function_may_have_all_shared_memory_that_it_names(shared_bytes: int, driver: Driver) -> None:
    """Beside its static arrays 48 KB are too much, though CUDA gives as much without being asked."""
    load_function("add_norm", b"code", shared_bytes)
    asked = [given[2] for name, given in driver.called if name == "cuFuncSetAttribute"]
    assert len(asked) == bool(shared_bytes)


def test_moved_pointers_leave_numbers_alone() -> None:
    moved = node(begins_early=False).moved({7: 70, 8: 80})
    assert [one.value for one in moved.arguments] == [70, 8]


def test_a_stream_ends_with_who_has_it(driver: Driver) -> None:
    stream = GraphStream()
    assert "cuStreamDestroy_v2" not in driver.names()
    del stream
    assert driver.called[-1] == ("cuStreamDestroy_v2", [1])
