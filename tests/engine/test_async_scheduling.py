"""An engine that launches each step before it reads the one before gives what one gives that does not."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.async_engine import joined
from parallm.engine.engine import PATIENCE, TRAFFIC_CLASSES, Engine
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
LoadTiny = Callable[..., SharedModel]
MakeEngine = Callable[..., Engine]
Told = Mapping[tuple[str, int], Sequence[TokenEvent]]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
NONE = SpeculationSettings(method="none")
PROMPT = (5, 300, 17, 9, 44, 2, 8)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def unit(engine: Engine) -> bool:
    """One unit of each class that has work; False if there was none."""
    ready = [traffic for traffic in TRAFFIC_CLASSES if engine.has_work(traffic)]
    for traffic in ready:
        engine.step(traffic)
    return bool(ready)


def told(events: Sequence[TokenEvent]) -> Told:
    by_row: dict[tuple[str, int], list[TokenEvent]] = defaultdict(list)
    for event in events:
        by_row[event.request_id, event.index].append(event)
    return by_row


def whole(told: Told) -> Mapping[tuple[str, int], TokenEvent]:
    """All that each row was told, however many tokens came at once."""
    return {row: joined(events)[0] for row, events in told.items()}


@pytest.fixture
def play(make_engine: MakeEngine) -> Callable[..., tuple[Told, Engine]]:
    """Run requests to their end, `acts[i]` before unit i; the events of each row."""

    def run(
        model: SharedModel,
        requests: Sequence[GenerationRequest],
        *,
        async_scheduling: bool,
        acts: Mapping[int, Callable[[Engine], None]] | None = None,
        **parts: Any,
    ) -> tuple[Told, Engine]:
        events: list[TokenEvent] = []
        engine = make_engine(model, events=events, async_scheduling=async_scheduling, **parts)
        for request in requests:
            engine.add(request, True)
        for place in range(10_000):
            if acts and place in acts:
                acts[place](engine)
            if not unit(engine):
                break
        assert (engine.num_running(), engine.num_waiting()) == (0, 0)
        assert sum(engine.num_tokens().values()) == sum(len(event.tokens) for event in events)
        return told(events), engine

    return run


def mixed_requests(ask: Ask) -> list[GenerationRequest]:
    """Requests of many lengths, with stops, groups, filters and alternatives, in both classes."""
    fields: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "ignore_eos": False, "stop": ("1", "the")},
        {"temperature": 0.7, "top_p": 0.9, "stop_token_ids": tuple(range(2, 60))},
        {"top_logprobs": 3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "n": 3},
    ]
    requests = [ask(f"r{i}", prompt(i, 3 + i * 7 % 40), 1 + i * 5 % 17, seed=i, **fields[i % 5]) for i in range(20)]
    return [replace(one, traffic=TRAFFIC_CLASSES[place % 3 == 0]) for place, one in enumerate(requests)]


@needs_strict
@pytest.mark.parametrize(
    ("architecture", "max_rows"),
    [
        ("llama", 1),
        ("llama", 5),
        ("gemma3_text", 5),
        ("mamba", 128),
        *(
            pytest.param(architecture, max_rows, marks=pytest.mark.slow)
            for architecture, max_rows in (
                ("llama", 128),
                ("gemma3_text", 1),
                ("gemma3_text", 128),
                ("mamba", 1),
                ("mamba", 5),
            )
        ),
    ],
)
def test_each_row_is_told_the_same(
    architecture: str, max_rows: int, load_tiny: LoadTiny, ask: Ask, play: Callable[..., tuple[Told, Engine]]
) -> None:
    model, settings = load_tiny(architecture), EngineSettings(max_rows=max_rows, prefill_chunk=16)
    ahead, behind = (
        play(model, mixed_requests(ask), async_scheduling=async_scheduling, settings=settings)[0]
        for async_scheduling in (True, False)
    )
    assert whole(ahead) == whole(behind)
    ends = [events[-1].completion for events in ahead.values()]
    assert {end.finish_reason for end in ends if end is not None} == {"stop", "length"}
    assert len(ends) == 28


@needs_strict
def test_rows_that_fill_the_context_end_there(
    load_tiny: LoadTiny, ask: Ask, play: Callable[..., tuple[Told, Engine]]
) -> None:
    requests = [ask(f"r{i}", prompt(i, 4 + 5 * i), 60, temperature=1.0, seed=i) for i in range(5)]
    model, settings = load_tiny("gpt2"), EngineSettings(max_context=32, speculation=NONE)
    ahead, behind = (play(model, requests, async_scheduling=way, settings=settings)[0] for way in (True, False))
    assert ahead == behind
    assert [len(ahead[f"r{i}", 0]) for i in range(5)] == [28, 23, 18, 13, 8]


@needs_strict
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
@pytest.mark.parametrize("when", [1, 2, 3, 6])
def test_an_abort_in_flight_drops_its_rows_and_disturbs_nobody(
    when: int, architecture: str, load_tiny: LoadTiny, ask: Ask, play: Callable[..., tuple[Told, Engine]]
) -> None:
    model = load_tiny(architecture)
    kept = [ask(f"k{i}", prompt(i, 5 + i), 9, temperature=1.0, seed=i) for i in range(4)]
    requests = [kept[0], ask("gone", PROMPT, 50, n=3), *kept[1:]]
    ahead, _ = play(model, requests, async_scheduling=True, acts={when: lambda engine: engine.abort("gone")})
    alone, _ = play(model, kept, async_scheduling=False)
    assert {row: events for row, events in ahead.items() if row[0] != "gone"} == alone
    assert all(event.completion is None for index in range(3) for event in ahead.get(("gone", index), ()))


def test_a_step_whose_rows_are_all_aborted_is_work_until_it_is_read(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("llama"), events=events, async_scheduling=True)
    engine.add(ask("a", PROMPT, 50), True)
    for _ in range(4):
        engine.step("serving")
    num_events = len(events)
    engine.abort("a")
    assert (engine.has_work("serving"), engine.num_running()) == (True, 0)
    engine.step("serving")
    assert (engine.has_work("serving"), len(events)) == (False, num_events)


@needs_strict
def test_versions_change_at_the_same_tokens(
    load_tiny: LoadTiny,
    ask: Ask,
    play: Callable[..., tuple[Told, Engine]],
    random_adapter: Callable[..., Adapter],
) -> None:
    model = load_tiny("llama")
    requests = [ask(f"r{i}", PROMPT[i:], 10 + i, temperature=1.0, seed=i, n=2) for i in range(4)]
    requests = [replace(one, switches_in_flight=place > 0) for place, one in enumerate(requests)]

    def run(async_scheduling: bool) -> Told:
        table = AdapterTable()
        table.publish(random_adapter(model, 1))
        publish = {unit: lambda _, v=v: table.publish(random_adapter(model, v)) for v, unit in ((2, 5), (3, 6), (4, 9))}
        events, _ = play(
            model,
            requests,
            async_scheduling=async_scheduling,
            acts=publish,
            table=table,
            settings=EngineSettings(speculation=NONE),
        )
        assert [card.num_running for card in table.cards()] == [0, 0, 0, 0]
        return events

    ahead = run(True)
    assert ahead == run(False)
    moved = ahead["r3", 1][-1].completion
    assert moved is not None
    assert [span.version for span in moved.weight_versions] == [1, 2, 3, 4]


def test_a_failure_ends_what_is_in_flight_and_the_next_request_works(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events, failures = load_tiny("llama"), list[TokenEvent](), list[tuple[list[str], Exception]]()
    engine = make_engine(model, events=events, failures=failures, async_scheduling=True)
    engine.add(ask("a", PROMPT, 9), True)
    engine.add(replace(ask("b", PROMPT, 9), traffic="rollout"), False)
    for _ in range(4):
        unit(engine)
    with monkeypatch.context() as patch:
        patch.setattr(SharedModel, "head", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as raised:
            engine.step("serving")
    num_events = len(events)
    engine.fail("serving", raised.value)
    assert ([names for names, _ in failures], engine.has_work("serving")) == ([["a"]], False)
    engine.add(ask("a", PROMPT, 9), False)
    while unit(engine):
        pass
    made = {event.request_id: event.completion for event in events[num_events:] if event.completion}
    assert made["a"].tokens == made["b"].tokens
    assert len(made["b"].tokens) == 9


def test_a_step_is_launched_before_the_one_before_is_read_and_none_behind_the_last(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(load_tiny("llama"), async_scheduling=True)
    engine.add(ask("a", PROMPT, 4, n=3, temperature=1.0, seed=1), False)
    engine.step("serving")
    order: list[str] = []
    launch, wait = mx.async_eval, mx.eval

    def launched(arrays: list[list[mx.array]]) -> None:
        if arrays:
            order.append("launch")
            launch(arrays)

    def read(arrays: list[list[mx.array]]) -> None:
        order.append("read")
        wait(arrays)

    monkeypatch.setattr(mx, "async_eval", launched)
    monkeypatch.setattr(mx, "eval", read)
    while engine.has_work("serving"):
        engine.step("serving")
    prompt = ["launch", "read"]  # the prompt is waited for once the first step is behind it
    assert order == [*prompt, "launch", "read", "launch", "read", "launch", "read", "read"]


def test_settling_reads_what_is_in_flight_without_a_new_step(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("llama"), events=events, async_scheduling=True)
    engine.add(ask("a", PROMPT, 9), True)
    for _ in range(3):
        engine.step("serving")
    assert len(events) == 1
    for _ in range(2):
        engine.flush("serving")
        engine.flush("rollout")
    assert len(events) == 2
    while unit(engine):
        pass
    assert [len(event.tokens) for event in events] == [1] * 9


@pytest.mark.parametrize(
    ("count", "async_scheduling", "expected"), [(1, True, PATIENCE), (PATIENCE, True, 1), (1, False, 1)]
)
def test_a_prompt_waits_a_little_for_others_while_many_answers_run(
    count: int,
    async_scheduling: bool,
    expected: int,
    make_engine: MakeEngine,
    load_tiny: LoadTiny,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For as many units as `expected` since the last prompt; several that come together do not wait."""
    monkeypatch.setattr("parallm.engine.engine.MANY_ANSWERS", 4)
    settings = EngineSettings(max_rows=16, speculation=NONE)
    engine = make_engine(load_tiny("llama"), events=[], settings=settings, async_scheduling=async_scheduling)
    engine.add(ask("many", PROMPT, 60, n=4), False)
    compute = Mock(wraps=engine._compute)
    monkeypatch.setattr(engine, "_compute", compute)
    while engine.num_running() < 4:
        engine.step("serving")
    compute.reset_mock()
    for place in range(count):
        engine.add(ask(f"late-{place}", PROMPT[place:], 4), False)
    units = 0
    while not compute.called:
        engine.step("serving")
        units += 1
    assert units - 1 + engine._queues["serving"].num_decodes in (expected - 1, expected)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_the_first_prompts_of_a_burst_may_decode_while_others_are_computed(
    takes_turns: bool, make_engine: MakeEngine, load_tiny: LoadTiny, ask: Ask
) -> None:
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(speculation=NONE), async_scheduling=True)
    engine.prefill.takes_turns = takes_turns
    count = 4 * engine._streams.width
    for place in range(count):
        engine.add(ask(f"r{place}", PROMPT[place % 4 :], 40), False)
    engine.step("serving")
    engine.step("serving")
    assert (engine.num_running() > 0) is takes_turns
    while unit(engine):
        pass
    assert engine.num_tokens()["serving"] == 40 * count
