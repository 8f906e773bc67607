from collections.abc import Callable
from dataclasses import replace

from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
PROMPT = (5, 300, 17, 9, 44, 2, 8)


def steps(engine: Engine, number: int = 1000) -> None:
    for _ in range(number):
        if engine.has_work("serving"):
            engine.step("serving")


def ends(events: list[TokenEvent]) -> list[str]:
    return [event.request_id for event in events if event.completion is not None]


def test_of_waiting_requests_the_lowest_priority_number_goes_first(
    load_tiny: Callable[[str], SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("mamba"), events=events, settings=EngineSettings(max_rows=1))
    for name, priority in (("a", 0), ("b", 0), ("late", 5), ("c", 0), ("first", -1), ("second", -1)):
        engine.add(replace(ask(name, PROMPT, 2), priority=priority), False)
    steps(engine)
    assert ends(events) == ["first", "second", "a", "b", "c", "late"]


def test_a_cancelled_request_tells_what_it_has_and_others_go_on(
    load_tiny: Callable[[str], SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    model, events = load_tiny("llama"), list[TokenEvent]()
    engine = make_engine(model, events=events)
    engine.add(ask("gone", PROMPT, 50, n=2), True)
    engine.add(ask("kept", PROMPT, 12), False)
    steps(engine, 7)
    engine.add(ask("waits", PROMPT, 50), False)
    streamed = "".join(event.text for event in events if (event.request_id, event.index) == ("gone", 1))
    engine.cancel("gone", "waits", "unknown")
    told = [event for event in events if event.completion is not None]
    made = {(event.request_id, event.index): event.completion for event in told if event.completion is not None}
    assert {key: one.finish_reason for key, one in made.items()} == dict.fromkeys(
        (("gone", 0), ("gone", 1), ("waits", 0)), "abort"
    )
    sampled = [token for event in events if (event.request_id, event.index) == ("gone", 1) for token in event.tokens]
    assert list(made["gone", 1].tokens) == sampled
    assert len(made["gone", 1].tokens) == len(made["gone", 1].logprobs) > 3
    assert made["gone", 1].text == streamed + told[1].text
    assert (made["waits", 0].tokens, made["waits", 0].weight_versions) == ((), ())
    assert engine.num_running() == 1
    steps(engine)
    assert ends(events)[3:] == ["kept"]


def test_a_paused_class_stays_as_it_is_until_it_is_resumed(
    load_tiny: Callable[[str], SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    for async_scheduling in (False, True):
        events: list[TokenEvent] = []
        engine = make_engine(load_tiny("llama"), events=events, async_scheduling=async_scheduling)
        engine.add(ask("a", PROMPT, 8), True)
        steps(engine, 4)
        engine.pause("serving")
        before = len(events)
        engine.add(ask("b", PROMPT, 8), True)
        assert not engine.has_work("serving")
        assert (engine.num_running(), engine.num_waiting(), len(events)) == (1, 1, before)
        engine.resume("serving")
        engine.reset_caches()
        steps(engine)
        whole = {event.request_id: event.completion for event in events if event.completion is not None}
        assert whole["a"] is not None
        assert whole["b"] is not None
        assert whole["a"].tokens == whole["b"].tokens
        assert len(whole["a"].tokens) == 8


def test_caches_that_are_reset_hold_no_memory_at_once(
    load_tiny: Callable[[str], SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(load_tiny("llama"), events=[])
    engine.add(ask("a", PROMPT * 20, 2), False)
    steps(engine)
    assert engine.kv_budget.used == engine.memory.prefixes.nbytes > 0
    engine.reset_caches()
    assert engine.kv_budget.used == 0
