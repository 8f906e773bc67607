"""An error in a step ends that step's requests and nobody else's; where memory ran out it ends none."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.memory import is_out_of_memory
from parallm.device.settings import DeviceSettings
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.errors import ContextTooLong, EngineStopped
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]
LoadTiny = Callable[..., SharedModel]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
NO_MEMORY = "[malloc] Unable to allocate 1099511627776 bytes."


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def run(engine: Engine, most: int = 10_000) -> int:
    """Run units like the device thread: an error goes back to the engine. Returns how many units raised one."""
    num_errors = 0
    for _ in range(most):
        if not engine.has_work("serving"):
            break
        try:
            engine.step("serving")
        except Exception as error:  # noqa: BLE001  # whatever it is
            engine.fail("serving", error)
            num_errors += 1
    return num_errors


def made(events: Sequence[TokenEvent]) -> dict[tuple[str, int], Completion]:
    return {(event.request_id, event.index): event.completion for event in events if event.completion is not None}


def failing_hidden(monkeypatch: pytest.MonkeyPatch, error: Exception, when: Callable[[mx.array], bool]) -> None:
    hidden = SharedModel.hidden

    def raising(self: SharedModel, tokens_BT: mx.array, *rest: Any) -> mx.array:
        if when(tokens_BT):
            raise error
        return hidden(self, tokens_BT, *rest)

    monkeypatch.setattr(SharedModel, "hidden", raising)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(NO_MEMORY),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"),
        MemoryError("std::bad_alloc"),
    ],
)
def test_what_the_builds_of_mlx_say_without_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("[matmul] shapes do not match"))


@needs_strict
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_cannot_be_computed_fails_alone(
    async_scheduling: bool, load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama")
    requests = [ask(f"r{i}", prompt(i, 9), 12, temperature=1.0, seed=i, n=2) for i in range(3)]
    expected: list[TokenEvent] = []
    roomy = make_engine(model, events=expected)
    for request in requests:
        roomy.add(request, True)
    run(roomy)
    events: list[TokenEvent] = []
    failures: list[tuple[list[str], Exception]] = []
    engine = make_engine(model, events=events, failures=failures, async_scheduling=async_scheduling)
    for request in requests:
        engine.add(request, True)
    run(engine, most=5)
    failing_hidden(monkeypatch, ValueError("no such token"), lambda tokens_BT: tokens_BT.shape == (1, 23))
    engine.add(ask("bad", prompt(7, 23), 5), True)
    assert run(engine) == 1
    assert [(names, str(error)) for names, error in failures] == [(["bad"], "no such token")]
    assert made(events) == made(expected)
    assert sum(len(event.tokens) for event in events) == 72


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_leaves_prompts_that_wait_alone(
    async_scheduling: bool, load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[TokenEvent] = []
    failures: list[tuple[list[str], Exception]] = []
    engine = make_engine(
        load_tiny("llama"),
        events=events,
        failures=failures,
        settings=EngineSettings(max_rows=2),
        async_scheduling=async_scheduling,
    )
    for name in "abc":
        engine.add(ask(name, prompt(1, 9), 8), False)
    run(engine, most=4)
    with monkeypatch.context() as patch:
        failing_hidden(patch, ValueError("no"), lambda tokens_BT: tokens_BT.shape[1] == 1)
        assert run(engine, most=1) == 1
    began = time.perf_counter()
    run(engine)
    assert time.perf_counter() - began < 1
    assert [names for names, _ in failures] == [["a", "b"]]
    assert [name for name, _ in made(events)] == ["c"]


@needs_strict
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["prompts", "rows"])
def test_nobody_fails_where_memory_runs_out_and_fewer_rows_fit(
    where: str,
    async_scheduling: bool,
    load_tiny: LoadTiny,
    ask: Ask,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_tiny("llama")
    requests = [ask(f"r{i}", prompt(i, 9 + i), 20, temperature=1.0, seed=i, n=3) for i in range(8)]
    found = []
    failures: list[tuple[list[str], Exception]] = []
    for raises in (False, True):
        events: list[TokenEvent] = []
        engine = make_engine(model, events=events, failures=failures, async_scheduling=async_scheduling)
        forgotten: list[int] = []
        monkeypatch.setattr(engine._loras, "clear", partial(forgotten.append, 1))
        if raises:
            # as many rows as fill more than eight slots of either stream, or a prompt beside many rows
            failing_hidden(
                monkeypatch,
                RuntimeError(NO_MEMORY),
                lambda tokens_BT: (
                    engine.num_running() > 12 and (tokens_BT.shape[1] == 1) == (where == "rows")  # noqa: B023
                ),
            )
        num_errors = 0
        for some, units in ((requests[:5], 6), (requests[5:], 10_000)):
            for request in some:
                engine.add(request, True)
            num_errors += run(engine, units)
        found.append(made(events))
        assert sum(len(event.tokens) for event in events) == 8 * 3 * 20
    assert found[0] == found[1]
    assert failures == []
    assert 1 <= num_errors <= 12
    assert len(forgotten) == num_errors
    assert engine.kv_budget.limit < 2 * 10**6
    assert "engine.kv_cache_bytes" in caplog.text


def test_a_request_alone_without_memory_fails_and_the_next_one_works(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[TokenEvent] = []
    failures: list[tuple[list[str], Exception]] = []
    engine = make_engine(load_tiny("llama"), events=events, failures=failures)
    with monkeypatch.context() as patch:
        failing_hidden(patch, RuntimeError(NO_MEMORY), lambda _: True)
        engine.add(ask("a", prompt(1, 9), 20), True)
        assert 1 <= run(engine) <= 3
    assert [names for names, _ in failures] == [["a"]]
    began = time.perf_counter()
    engine.add(ask("b", prompt(1, 9), 20), True)
    assert run(engine) == 0
    assert time.perf_counter() - began < 1
    assert len(made(events)["b", 0].tokens) == 20


def test_a_request_that_came_before_the_limit_fell_is_refused_if_it_fits_no_longer(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    engine = make_engine(load_tiny("llama"))
    request = ask("a", prompt(1, 300), 20)
    engine.kv_budget.check(request)
    assert engine.kv_budget.lower([], engine.kv_budget.needed(request))
    with pytest.raises(ContextTooLong, match="300 prompt tokens"):
        engine.add(request, True)
    assert not engine.has_work("serving")


@pytest.mark.cpu
def test_drafts_of_requests_that_failed_are_forgotten(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    engine = make_engine(load_tiny("llama"))
    engine.add(ask("a", prompt(1, 9), 20, n=2), True)
    engine.add(ask("b", prompt(2, 9), 20), True)
    run(engine, 6)
    assert set(engine.speculation._requests) == {"a", "b"}
    engine.fail("serving", EngineStopped("it ends"))
    assert not engine.speculation._requests
    assert not engine.speculation._pending


def test_when_the_thread_ends_everybody_is_told(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    failures: list[tuple[list[str], Exception]] = []
    engine = make_engine(load_tiny("llama"), failures=failures, settings=EngineSettings(max_rows=1))
    for name in "ab":
        engine.add(ask(name, prompt(1, 9), 20), True)
    run(engine, most=4)
    engine.fail("serving", EngineStopped("the end"))
    assert [names for names, _ in failures] == [["a", "b"]]
    assert not engine.has_work("serving")
