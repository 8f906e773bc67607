"""Captured steps: which models launch kernels of ours alone, when steps are captured, and what they read."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bench.workers.random_model import random_base, random_model
from bench.workers.workbench import random_adapter
from mlx_lm.utils import load_tokenizer

from parallm.engine import captured_forward
from parallm.engine.captured_forward import FEW_ROWS, CapturedForward
from parallm.engine.kv.paged_cache import make_pools
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels import cuda, cuda_graph
from parallm.model.kernels.all_sum import PeerMemory
from parallm.model.kernels.columns import memory_of
from parallm.model.kernels.compiler import Specialization
from parallm.model.kernels.cuda_graph import VIEWS, Arena, Capture, NotCaptured, capture
from parallm.model.kernels.driver import CudaError
from parallm.model.load import NANO, share_model
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import LoraSelector
from parallm.model.quantized import cast
from parallm.model.settings import ModelSettings
from parallm.model.tensor_parallel import Ranks
from tests.engine.test_kernel_list import SHAPE, launched

__all__ = ["launched"]
QUANTIZED = {"quantization": {"group_size": 64, "bits": 4}}
WHOLE: Any = SimpleNamespace(parallel=None)
"""Stands in for a model whose forward is never built."""
WIDER = {"hidden_size": 256, "intermediate_size": 512}


def note_launch(kernel: cuda.Kernel, inputs: Sequence[mx.array], scalars: Any = (), **launch: Any) -> list[mx.array]:
    """Outputs of zeros that depend on the inputs."""
    arrays = list(map(memory_of, inputs))
    outputs = [mx.zeros(*one) for one in zip(launch["output_shapes"], launch["output_dtypes"], strict=True)]
    mx.eval(outputs)
    depending: list[mx.array] = mx.depends(outputs, arrays)
    noted = cuda._captured.get()
    if noted is not None:
        noted.append(cuda.Launch(kernel, arrays, depending, scalars, launch["grid"], launch["threadgroup"]))
    return depending


def addresses(arrays: Sequence[mx.array]) -> list[int | None]:
    """Those in the memory of a CPU."""
    mx.eval(arrays)
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    views = [np.asarray(array.view(words[array.dtype.size])) for array in arrays]
    return [view.ctypes.data if view.flags.c_contiguous else None for view in views]


@dataclass
class Driver:
    """Stands in for CUDA: what is launched, and what captured forwards read."""

    captures: list[Callable[[], mx.array]] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    graphs: Any = field(default_factory=lambda: SimpleNamespace(address=98))
    launches: list[int] = field(default_factory=list)
    resets: int = 0
    waited: list[int] = field(default_factory=list)
    arrivals: Any = field(default_factory=lambda: SimpleNamespace(address=99))

    def capture(self, forward: Callable[[], mx.array], arena: Arena, given: Sequence[int]) -> Capture:
        assert isinstance(arena, Arena)
        assert given == [1, 2]
        self.captures.append(forward)
        return Capture(nodes=[], result=mx.zeros((4, 8)), kept=[])

    def launch(self, graph: int, arrivals: int) -> int:
        assert arrivals > 0
        self.launches.append(graph)
        return len(self.launches)

    def reset(self) -> None:
        self.resets += 1


@dataclass(frozen=True, eq=False)
class Weights:
    layout: object
    arrays: tuple[mx.array, ...]
    num_versions: int = 1
    experts: tuple[()] = ()


@dataclass(frozen=True)
class Lora:
    weights: Weights
    order_B2: mx.array


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, copied = Driver(), [1, 2]

    def copy_into(targets: Sequence[mx.array], sources: Sequence[mx.array], counter: int = 0) -> tuple[mx.array, int]:
        assert counter in (0, 99)
        for target, source in zip(targets, sources, strict=True):
            np.asarray(target).ravel()[:] = np.asarray(source).ravel()[: target.size]
        return mx.zeros(1), 3

    def graph(_: object) -> int:
        made.made.append(len(made.made))
        return made.made[-1]

    def wait_until(counter: int, awaited: int) -> mx.array:
        assert counter == 98
        made.waited.append(awaited)
        return mx.zeros(1)

    monkeypatch.setattr(captured_forward, "GraphStream", lambda: made)
    monkeypatch.setattr(captured_forward, "Graph", graph)
    monkeypatch.setattr(captured_forward, "capture", lambda *given: made.capture(*given))
    monkeypatch.setattr(captured_forward, "copy_into", copy_into)
    monkeypatch.setattr(captured_forward, "wait_until", wait_until)
    monkeypatch.setattr(captured_forward, "addresses", lambda _: list(copied))
    return made


@pytest.fixture
def pools() -> list[mx.array]:
    return [mx.zeros((1, 2)), mx.zeros((1, 2))]


def call(captured: CapturedForward, pools: list[mx.array], rows: int = 4, lora: Any = None) -> mx.array | None:
    tokens_B = mx.arange(rows, dtype=mx.int32)
    return captured(tokens_B, tokens_B + 1, mx.zeros((rows, 4), mx.int32), pools, lora)


@pytest.fixture
def noted(launched: dict[Specialization, None], driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launched` lets the process believe that it has a GPU. Launches are noted here, and compute nothing; what
    captures them is real."""
    monkeypatch.setattr(cuda.Kernel, "__call__", note_launch)
    monkeypatch.setattr(cuda_graph, "VIEWS", VIEWS | {"Depends"})
    monkeypatch.setattr(cuda_graph, "_function", lambda _: 0)
    for module in (cuda_graph, captured_forward):
        monkeypatch.setattr(module, "addresses", addresses)
    monkeypatch.setattr(captured_forward, "capture", capture)


@pytest.mark.parametrize(
    ("changed", "is_captured"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen3"}, True),
        ({"model_type": "smollm3"}, True),
        (WIDER | QUANTIZED, True),
        ({"model_type": "gemma"}, False),
    ],
)
def test_steps_of_these_models_launch_kernels_of_ours_alone(
    changed: dict[str, Any], is_captured: bool, noted: None
) -> None:
    shape = SHAPE | {"rope_theta": 10000.0, "tie_word_embeddings": True} | changed
    model = random_model(shape, dtype="bfloat16")
    mx.eval(model.base.parameters())
    captured, pools = CapturedForward(model), [array for pair in make_pools(model, 1) for array in pair]
    for rows in (4, 32):
        lora = LoraSelector(model).select([random_adapter(model, 1)] * rows)
        assert isinstance(lora, SegmentedLora)
        steps = [captured.prepare(rows, 4, pools, binding) for binding in (None, lora)]
        assert [step is not None for step in steps] == [is_captured] * 2, captured._reasons
        for step in (step for step in steps if step is not None):
            assert not {id(array) for array in step.captured.kept} & set(map(id, pools))
            assert len(step.captured.nodes) > 5 * model.num_layers
            assert step.captured.result.shape == (rows, shape["hidden_size"])
    assert captured.min_rows == (FEW_ROWS if is_captured else 1)


@pytest.mark.parametrize("bits", [{}, QUANTIZED], ids=["dense", "quantized"])
def test_steps_of_a_divided_model_launch_kernels_of_ours_alone(bits: dict[str, Any], noted: None) -> None:
    shape = SHAPE | WIDER | {"hidden_size": 512, "num_attention_heads": 4, "rope_theta": 10000.0} | bits
    peers = PeerMemory(rank=0, size=2, addresses=mx.zeros(4, mx.uint64))
    ranks = Ranks(group=mx.distributed.init(), peers=peers)
    tokenizer, base = ChatTokenizer(load_tokenizer(NANO)), random_base(shape)
    cast(base, mx.bfloat16)
    model = share_model(base, shape, tokenizer, ModelSettings(), ranks=ranks)
    mx.eval(model.base.parameters(), peers.addresses)
    captured, pools = CapturedForward(model), [array for pair in make_pools(model, 1) for array in pair]
    for rows in (4, 32):
        for lora in (None, LoraSelector(model).select([random_adapter(model, 1)] * rows)):
            assert lora is None or isinstance(lora, SegmentedLora)
            step = captured.prepare(rows, 4, pools, lora)
            assert step is not None, captured._reasons
            assert len(step.captured.nodes) > 5 * model.num_layers


def test_a_form_is_captured_once(driver: Driver, pools: list[mx.array]) -> None:
    captured = CapturedForward(WHOLE)
    for rows in (4, 8, 4):
        hidden_BH = call(captured, pools, rows)
        assert hidden_BH is not None
        assert hidden_BH.shape[0] == rows
    assert (len(driver.captures), driver.launches) == (2, [0, 1, 0])
    assert driver.waited == [1, 2, 3], "MLX waits for each graph"


def test_grown_pools_get_new_graphs_and_are_not_kept(driver: Driver, pools: list[mx.array]) -> None:
    captured = CapturedForward(WHOLE)
    call(captured, pools)
    grown = [mx.zeros((2, 2)), mx.zeros((2, 2))]
    call(captured, grown)
    call(captured, grown)
    assert (len(driver.captures), driver.launches) == (1, [0, 1, 1])


@pytest.mark.parametrize("refused", [0, 1], ids=["its stream", "a form"])
def test_a_form_that_another_rank_cannot_capture_is_captured_nowhere(
    driver: Driver, pools: list[mx.array], refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    others, told = iter([10**9, *(int(place != refused) for place in range(3))]), list[int]()

    def smallest(number: int) -> int:
        told.append(int(number))
        return min(number, next(others))

    model: Any = SimpleNamespace(parallel=SimpleNamespace(smallest=smallest))
    with caplog.at_level(logging.INFO):
        captured = CapturedForward(model)
        found = [call(captured, pools, rows) is not None for rows in (4, 8, 4)]
    assert found == ([False, True, False] if refused else [False] * 3)
    assert told[1:] == ([1, 1, 1] if refused else [1]), "each form is agreed on once"
    assert captured.min_rows == 1
    assert "another rank cannot capture them" in caplog.text


def test_lora_weights_are_copied_when_they_change(
    driver: Driver, pools: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_forward, "replace", lambda one, **new: type(one)(**(vars(one) | new)))
    captured, layout = CapturedForward(WHOLE), object()
    versions = [Weights(layout, (mx.full(3, float(number)),)) for number in (1, 2)]
    order = mx.zeros((4, 2), mx.int32)
    for place, expected in ((0, 1.0), (1, 2.0), (0, 1.0)):
        call(captured, pools, lora=Lora(versions[place], order))
        (copy,) = captured._weights.values()
        assert copy.weights.arrays[0].tolist() == [expected] * 3
        assert versions[place].arrays[0] is not copy.weights.arrays[0]
    assert len(driver.captures) == 1
    call(captured, pools, lora=Lora(versions[0], mx.zeros((6, 2), mx.int32)))
    assert len(driver.captures) == 2, "an order of another length is another form"


def refuse(driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def capture(*_: Any) -> Capture:
        driver.captures.append(lambda: mx.zeros(1))
        raise error

    monkeypatch.setattr(captured_forward, "capture", capture)


@pytest.mark.parametrize("error", [NotCaptured("MLX computes Add"), CudaError("cuGraphCreate: not supported")])
def test_what_cannot_be_captured_is_tried_and_told_once(
    error: Exception,
    driver: Driver,
    pools: list[mx.array],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse(driver, monkeypatch, error)
    captured = CapturedForward(WHOLE)
    with caplog.at_level(logging.INFO):
        found = [(call(captured, pools, rows), captured.min_rows) for rows in (64, 4, 4)]
    assert found == [(None, 4), (None, 1), (None, 1)], "many rows may go through MLX's products"
    assert len(driver.captures) == 2
    assert caplog.text.count("one by one") == 1
    assert driver.launches == []


@pytest.mark.parametrize("error", [CudaError("cuGraphInstantiate: out of memory"), MemoryError()])
def test_what_memory_was_short_for_is_tried_again(
    error: Exception, driver: Driver, pools: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(driver, monkeypatch, error)
    captured = CapturedForward(WHOLE)
    for _ in range(2):
        with pytest.raises(type(error)):
            call(captured, pools)
    assert (len(driver.captures), captured.min_rows) == (2, 4)


def test_without_a_driver_nothing_is_captured(monkeypatch: pytest.MonkeyPatch, pools: list[mx.array]) -> None:
    def fail() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(captured_forward, "GraphStream", fail)
    captured = CapturedForward(WHOLE)
    assert (call(captured, pools), captured.min_rows) == (None, 1)


def test_grown_pools_without_a_graph_leave_the_step_as_it_was(
    driver: Driver, pools: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = CapturedForward(WHOLE)
    call(captured, pools)
    (step,) = captured._steps.values()
    assert step is not None
    before = step.captured, step.pools, step.graph

    def fail(_: object) -> None:
        raise CudaError("out of memory")

    grown = [mx.zeros((2, 2)), mx.zeros((2, 2))]
    with monkeypatch.context() as short_memory:
        short_memory.setattr(captured_forward, "Graph", fail)
        with pytest.raises(CudaError):
            call(captured, grown)
    assert (step.captured, step.pools, step.graph) == before
    call(captured, grown)
    assert step.pools is captured._pools.addresses


@pytest.mark.parametrize("failing", ["inputs", "launch", "wait"])
def test_after_a_failure_counters_begin_anew(
    failing: str, driver: Driver, pools: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = CapturedForward(WHOLE)
    call(captured, pools)

    def fail(*_: object) -> None:
        raise MemoryError

    match failing:
        case "inputs":
            monkeypatch.setattr(mx, "async_eval", fail)
        case "launch":
            monkeypatch.setattr(driver, "launch", fail)
        case "wait":
            monkeypatch.setattr(captured_forward, "wait_until", fail)
    with pytest.raises(MemoryError):
        call(captured, pools)
    assert driver.resets == 1


def test_graphs_of_forms_that_nobody_uses_are_given_up(
    driver: Driver, pools: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_forward, "MAX_STEPS", 2)
    captured = CapturedForward(WHOLE)
    for rows in (4, 8, 4, 16, 4, 8):
        call(captured, pools, rows)
    assert len(driver.captures) == 4


@pytest.fixture
def loras(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Lora]:
    """Of three layouts, of which the weights of two have room."""
    monkeypatch.setattr(captured_forward, "replace", lambda one, **new: type(one)(**(vars(one) | new)))
    monkeypatch.setattr(captured_forward, "device_memory", lambda: 2.5 * 12 / captured_forward.LORA_PART)
    return [Lora(Weights(object(), (mx.zeros(3),)), mx.zeros((4, 2), mx.int32)) for _ in range(3)]


def test_weights_of_forms_that_nobody_uses_are_given_back_with_their_graphs(
    driver: Driver, pools: list[mx.array], loras: list[Lora]
) -> None:
    captured = CapturedForward(WHOLE)
    first, second, third = loras
    for lora in (first, second, first, None, third, first, None):
        call(captured, pools, lora=lora)
    assert len(driver.captures) == 4, "the second has gone, and the base has no weights to lose"
    assert len(captured._weights) == 2
    assert len(captured._steps) == 3
    call(captured, pools, lora=second)
    assert len(driver.captures) == 5


def test_room_is_made_before_it_is_needed(
    driver: Driver, pools: list[mx.array], loras: list[Lora], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = CapturedForward(WHOLE)
    for lora in loras[:2]:
        call(captured, pools, lora=lora)

    def fail(_: object) -> None:
        assert len(captured._weights) == 1
        raise MemoryError

    monkeypatch.setattr(captured_forward, "PackedCopy", fail)
    with pytest.raises(MemoryError):
        call(captured, pools, lora=loras[2])
    captured._max_lora_bytes = 0
    with pytest.raises(AssertionError):  # all have gone, but the new one would be there, whatever its size
        call(captured, pools, lora=loras[2])
    assert not captured._weights
