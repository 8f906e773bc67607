"""Rows that give up their room and are computed again later get the tokens that they would have got with room."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.engine import TRAFFIC_CLASSES, Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent, WeightSpan

Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
LITTLE = 5 * 96 * 512
"""Bytes of llama: a prompt of 92 tokens and four slots of 96."""


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def unit(engine: Engine) -> bool:
    ready = [traffic for traffic in TRAFFIC_CLASSES if engine.has_work(traffic)]
    for traffic in ready:
        engine.step(traffic)
        assert engine.kv_budget.used <= engine.kv_budget.limit
    return bool(ready)


def made(events: Sequence[TokenEvent]) -> dict[tuple[str, int], Completion]:
    return {(event.request_id, event.index): event.completion for event in events if event.completion is not None}


def many(ask: Ask) -> list[GenerationRequest]:
    fields: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"prompt_logprobs": 2}]
    requests = [
        ask(f"r{i}", prompt(i, 5 + 9 * i % 40), 10 + 7 * i % 36, temperature=1.0, seed=i, **fields[i % 3])
        for i in range(12)
    ]
    requests[3] = replace(requests[3], n=5)
    return [replace(one, traffic=TRAFFIC_CLASSES[place % 3 == 0]) for place, one in enumerate(requests)]


@needs_strict
@pytest.mark.parametrize(
    ("architecture", "times", "async_scheduling"),
    [
        ("llama", 1, True),
        ("gemma3_text", 2, True),
        ("gpt2", 2, False),
        pytest.param("llama", 1, False, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 2, False, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, True, marks=pytest.mark.slow),
    ],
)
def test_with_little_memory_everybody_gets_the_bits_that_he_gets_with_room(
    architecture: str,
    times: int,
    async_scheduling: bool,
    load_tiny: Callable[..., SharedModel],
    ask: Ask,
    make_engine: MakeEngine,
) -> None:
    found: list[dict[tuple[str, int], Completion]] = []
    for settings in (EngineSettings(), EngineSettings(kv_cache_bytes=times * LITTLE, prefill_chunk=16)):
        events: list[TokenEvent] = []
        engine = make_engine(
            load_tiny(architecture), events=events, settings=settings, async_scheduling=async_scheduling
        )
        for request in many(ask):
            engine.kv_budget.check(request)
            engine.add(request, True)
        while unit(engine):
            pass
        found.append(made(events))
        assert sum(len(event.tokens) for event in events) == sum(len(one.tokens) for one in found[-1].values())
    assert found[0] == found[1]
    assert len(found[0]) == 16
    assert engine.scheduler.num_preempted >= 5
    assert engine.kv_budget.used == engine.memory.prefixes.nbytes


@needs_strict
@pytest.mark.parametrize("max_rows", [2, 64])
def test_requests_that_go_before_others_take_their_memory_and_everybody_ends(
    max_rows: int, load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    found: list[dict[tuple[str, int], Completion]] = []
    for kv_cache_bytes in (None, LITTLE):
        settings = EngineSettings(kv_cache_bytes=kv_cache_bytes, prefill_chunk=16, max_rows=max_rows)
        events: list[TokenEvent] = []
        engine = make_engine(load_tiny("llama"), events=events, settings=settings)
        for place, request in enumerate(many(ask)):
            engine.add(replace(request, priority=-place // 2), True)
            unit(engine)
            unit(engine)
        while unit(engine):
            pass
        found.append(made(events))
    assert found[0] == found[1]
    assert len(found[0]) == 16
    assert engine.scheduler.num_preempted >= 5


def test_a_prompt_that_was_begun_makes_room_for_one_that_goes_before_it(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    model, events = load_tiny("llama"), list[TokenEvent]()
    requests = [replace(ask(name, prompt(1, 90), 4), priority=-place) for place, name in enumerate(("late", "first"))]
    most = make_engine(model, events=[]).kv_budget.needed(requests[0])
    engine = make_engine(model, events=events, settings=EngineSettings(kv_cache_bytes=most, prefill_chunk=16))
    for request in requests:
        engine.add(request, False)
        unit(engine)
    while unit(engine):
        pass
    assert list(made(events)) == [("first", 0), ("late", 0)]
    assert engine.scheduler.num_preempted == 1


def test_a_storm_of_short_and_long_requests_never_holds_more_than_the_limit(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    model, random, events = load_tiny("llama"), np.random.default_rng(1), list[TokenEvent]()
    engine = make_engine(model, events=events, settings=EngineSettings(kv_cache_bytes=3_000_000, max_rows=32))
    lengths = [int(random.integers(200, 500) if place % 20 == 7 else random.integers(5, 60)) for place in range(200)]
    for place, length in enumerate(lengths):
        request = ask(f"r{place}", prompt(place, length), int(random.integers(2, 48)), temperature=1.0, seed=place)
        engine.kv_budget.check(request)
        engine.add(replace(request, traffic=TRAFFIC_CLASSES[place % 2]), False)
    while unit(engine):
        pass
    assert len(made(events)) == 200
    assert engine.scheduler.num_preempted > 0
    assert engine.kv_budget.used == engine.memory.prefixes.nbytes


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["gemma2"])
def test_rows_that_run_one_by_one_are_preempted_too(
    architecture: str, load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    events: list[TokenEvent] = []
    model, limit = load_tiny(architecture), 60_000
    engine = make_engine(model, events=events, settings=EngineSettings(kv_cache_bytes=limit))
    requests = [ask(f"r{i}", prompt(i, 5 + i), 30) for i in range(6)]
    for request in requests:
        engine.kv_budget.check(request)
        engine.add(request, False)
    num_running = 0
    while unit(engine):
        num_running = max(num_running, engine.num_running())
    assert 1 <= num_running <= 4
    for request in requests:
        other: list[TokenEvent] = []
        alone = make_engine(model, events=other)
        alone.add(request, False)
        while unit(alone):
            pass
        assert made(other)[request.request_id, 0].tokens == made(events)[request.request_id, 0].tokens


def test_rollouts_give_way_to_serving_and_the_newest_first(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    # five slots of 48 and a prompt of 32: then serving takes what the newest rollouts have
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(kv_cache_bytes=(8 * 48 + 32) * 512))
    rollouts = [replace(ask(f"o{i}", prompt(i, 10), 30), traffic="rollout") for i in range(6)]
    for request in rollouts:
        engine.add(request, True)
    for _ in range(12):
        engine.step("rollout")
    running = engine.num_running()
    engine.add(ask("s", prompt(9, 12), 30), False)
    for _ in range(3):
        engine.step("serving")
    names = [row.request.request_id for row in engine._queues["rollout"].running()]
    assert [row.request.request_id for row in engine._queues["serving"].running()] == ["s"]
    assert sorted(names) == [f"o{i}" for i in range(len(names))]
    assert len(names) < running
    while unit(engine):
        pass


@needs_strict
def test_a_row_that_switched_versions_is_computed_again_with_each_of_them(
    load_tiny: Callable[..., SharedModel],
    ask: Ask,
    make_engine: MakeEngine,
    random_adapter: Callable[..., Adapter],
) -> None:
    model, found = load_tiny("llama"), []
    request = replace(ask("r", prompt(1, 21), 24, temperature=1.0, seed=3), switches_in_flight=True)
    for preempts in (False, True):
        events: list[TokenEvent] = []
        table = AdapterTable(keep=1)
        table.publish(random_adapter(model, 1))
        engine = make_engine(model, events=events, table=table)
        engine.add(request, True)
        while engine.has_work("serving"):
            num_tokens = sum(len(event.tokens) for event in events)
            version = {3: 2, 4: 3, 9: 4}.get(num_tokens)
            if version and table.resolve("policy").version != version:  # type: ignore[union-attr]  # it is published
                table.publish(random_adapter(model, version))
            state = engine._queues["serving"]
            if preempts and num_tokens in (2, 4, 9, 15) and state.num_running:
                decoder = next(decoder for decoder in state.decoders if decoder.sequences)
                engine.scheduler.preempt(state, decoder, decoder.sequences[0])
            engine.step("serving")
        found.append(made(events)["r", 0])
        assert engine.scheduler.num_preempted == 4 * preempts
    assert found[0] == found[1]
    ends = (3, 4, 9, 24)
    assert found[1].weight_versions == tuple(
        WeightSpan(version=version, start=start, end=end)
        for version, start, end in zip((1, 2, 3, 4), (0, *ends), ends, strict=False)
    )


@pytest.mark.cpu
def test_an_aborted_request_is_gone_while_it_waits_to_be_computed_again(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    engine = make_engine(load_tiny("llama"))
    engine.add(ask("a", prompt(1, 9), 20, n=2), True)
    for _ in range(3):
        engine.step("serving")
    state = engine._queues["serving"]
    for decoder in [decoder for decoder in state.decoders if decoder.sequences]:
        engine.scheduler.preempt(state, decoder, decoder.sequences[0])
    assert (engine.num_running(), engine.num_waiting()) == (0, 2)
    engine.abort("a")
    assert not engine.has_work("serving")


@pytest.mark.cpu
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_one_long_row_needed_is_given_back_while_others_run(
    async_scheduling: bool, load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: MakeEngine
) -> None:
    engine = make_engine(
        load_tiny("llama"), async_scheduling=async_scheduling, settings=EngineSettings(kv_cache_bytes=40_000_000)
    )
    for index in range(4):
        engine.add(ask(f"short{index}", prompt(index, 9), 60), False)
    engine.add(ask("long", prompt(1, 1500), 3), False)
    most = 0
    while engine.num_waiting() or engine.num_running() == 5 or not most:
        engine.step("serving")
        most = max(most, engine.kv_budget.used)
    for _ in range(3):
        engine.step("serving")
    batches = [decoder.batch for decoder in engine._queues["serving"].decoders]
    assert (engine.num_running(), most >= 8 * 1504 * 512) == (4, True)
    assert engine.kv_budget.used - engine.memory.prefixes.nbytes == len(batches) * 8 * 80 * 512
