"""A row whose numbers are not finite fails by itself: every other row gets the tokens that it gets without it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from parallm.engine.engine import TRAFFIC_CLASSES, Engine
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.errors import NotFinite
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

LoadTiny = Callable[..., SharedModel]
Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]
Failures = list[tuple[list[str], Exception]]

NGRAM = EngineSettings(speculation=SpeculationSettings(method="ngram"))


def hot_adapter(model: SharedModel, version: int = 1, *, name: str = "hot", rank: int = 4) -> Adapter:
    """Finite factors whose product with any activation is not."""
    arrays = {}
    for target, (inputs, outputs) in model.targets.items():
        arrays[f"{target}.lora_a"] = mx.full((inputs, rank), 3e37)
        arrays[f"{target}.lora_b"] = mx.random.normal((rank, outputs), key=mx.random.key(len(target)))
    return make_adapter(arrays, name=name, version=version, rank=rank, alpha=rank)


def step(engine: Engine, most: int = 10_000) -> None:
    """Up to `most` units of each class that has work."""
    for _ in range(most):
        ready = [traffic for traffic in TRAFFIC_CLASSES if engine.has_work(traffic)]
        if not ready:
            return
        for traffic in ready:
            engine.step(traffic)


def completions(events: Sequence[TokenEvent]) -> dict[str, Completion]:
    return {event.request_id: event.completion for event in events if event.completion is not None}


@pytest.fixture
def answers(make_engine: MakeEngine, ask: Ask, random_adapter: Callable[..., Adapter]) -> Callable[..., object]:
    """Completions of rows of the base and of good adapters, some of which come when others have left."""

    def run(
        model: SharedModel, *, hot: str | None, num_good: int = 1, settings: EngineSettings | None = None
    ) -> tuple[dict[str, Completion], Failures]:
        table, events, failures = AdapterTable(), list[TokenEvent](), Failures()
        for place in range(num_good):
            table.publish(random_adapter(model, 1, name=f"good{place}"))
        table.publish(hot_adapter(model))
        engine = make_engine(model, events=events, failures=failures, table=table, settings=settings)
        early = [ask(f"early{place}", (5 + place, 300, 17), 14, model="base") for place in range(2)]
        early += [ask(f"good{place}", (8 + place, 30, 1), 14, model=f"good{place}") for place in range(num_good)]
        broken = [ask(f"hot{place}", (3, 4, 5 + place) * 9, 6, model="hot") for place in range(2)]
        places = {"first": 0, "middle": 1, "last": len(early), None: 0}
        requests = [*early[: places[hot]], *(broken if hot else []), *early[places[hot] :]]
        for request in requests:
            engine.add(request, False)
        step(engine, 9)
        for place in range(3):
            engine.add(ask(f"late{place}", (44 + place, 2), 8, model="base"), False)
        step(engine)
        return completions(events), failures

    return run


def cases() -> list[Any]:
    """Each base with one place of the row that fails in every check, llama with all."""
    bases = [
        *(("llama", number, None) for number in (1, 3, 5)),
        ("llama", 1, NGRAM),
        *((name, 1, None) for name in ("gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_moe", "mamba")),
    ]
    return [
        pytest.param(*base, hot, marks=() if place == 0 or place % 3 == number else pytest.mark.slow)
        for place, base in enumerate(bases)
        for number, hot in enumerate(("first", "middle", "last"))
    ]


@pytest.mark.parametrize(("architecture", "num_good", "settings", "hot"), cases())
def test_other_rows_get_the_tokens_that_they_get_without_it(
    architecture: str,
    num_good: int,
    settings: EngineSettings | None,
    hot: str,
    load_tiny: LoadTiny,
    answers: Callable[..., tuple[dict[str, Completion], Failures]],
) -> None:
    model = load_tiny(architecture)
    expected, _ = answers(model, hot=None, num_good=num_good, settings=settings)
    found, failures = answers(model, hot=hot, num_good=num_good, settings=settings)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in expected.items()}
    assert sorted(name for names, _ in failures for name in names) == ["hot0", "hot1"]
    assert {type(error) for _, error in failures} == {NotFinite}
    assert "with hot@1 the model computes numbers that are not finite" in str(failures[0][1])


@pytest.fixture
def around_a_switch(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, random_adapter: Callable[..., Adapter]
) -> Callable[..., tuple[dict[str, Completion], Failures]]:
    """Rows beside, and after, one that begins with a good version and switches to another."""

    def run(*, breaks: bool, aborts: bool, async_scheduling: bool) -> tuple[dict[str, Completion], Failures]:
        model, table, events, failures = load_tiny("llama"), AdapterTable(), list[TokenEvent](), Failures()
        table.publish(random_adapter(model, 1))
        engine = make_engine(model, events=events, failures=failures, table=table, async_scheduling=async_scheduling)
        engine.add(replace(ask("switching", (3, 4, 5) * 9, 20), switches_in_flight=True), False)
        for place in range(2):  # which all rows read as far as, on each stream
            engine.add(ask(f"long{place}", range(place, 40), 24, model="base"), False)
        for place in range(3):  # of the last rows one moves to where one leaves
            engine.add(ask(f"early{place}", (7, 8 + place), 24, model="base"), False)
        step(engine, 12)
        table.publish(hot_adapter(model, 2, name="policy") if breaks else random_adapter(model, 2))
        step(engine, 1 if aborts else 5)
        engine.abort("switching")
        engine.add(ask("late", (9, 10), 12, model="base"), False)
        step(engine)
        return completions(events), failures

    return run


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
def test_a_row_that_switches_to_such_a_version_leaves_nothing_behind(
    async_scheduling: bool, aborts: bool, around_a_switch: Callable[..., tuple[dict[str, Completion], Failures]]
) -> None:
    """Its prompt is computed well, and what it writes later lies behind the end of whichever row gets its slot."""
    expected, _ = around_a_switch(breaks=False, aborts=aborts, async_scheduling=async_scheduling)
    found, failures = around_a_switch(breaks=True, aborts=aborts, async_scheduling=async_scheduling)
    assert found.keys() == expected.keys() - {"switching"} == {"early0", "early1", "early2", "late", "long0", "long1"}
    assert all(found[name].tokens == expected[name].tokens for name in found)
    assert [names for names, _ in failures] == ([] if aborts and async_scheduling else [["switching"]])


def test_all_completions_of_a_request_fail_together_and_nothing_of_it_stays(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask
) -> None:
    model, table, events, failures = load_tiny("llama"), AdapterTable(), list[TokenEvent](), Failures()
    table.publish(hot_adapter(model))
    engine = make_engine(model, events=events, failures=failures, table=table)
    engine.add(ask("hot", (3, 4, 5), 6, n=3, model="hot"), True)
    step(engine)
    assert (events, [names for names, _ in failures]) == ([], [["hot"]])
    assert (engine.num_running(), engine.num_waiting(), table.cards()[0].num_running) == (0, 0, 0)


def test_log_probs_of_a_prompt_fail_too(load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask) -> None:
    model, table, events, failures = load_tiny("llama"), AdapterTable(), list[TokenEvent](), Failures()
    table.publish(hot_adapter(model))
    engine = make_engine(model, events=events, failures=failures, table=table)
    engine.add(ask("hot", (3, 4, 5), 0, model="hot", prompt_logprobs=0), False)
    engine.add(ask("base", (3, 4, 5), 0, model="base", prompt_logprobs=0), False)
    step(engine)
    assert (list(completions(events)), [names for names, _ in failures]) == (["base"], [["hot"]])


def test_a_rollout_ends_where_it_is_with_the_nan_that_the_learner_looks_for(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    model, table, events, failures = load_tiny("llama"), AdapterTable(), list[TokenEvent](), Failures()
    table.publish(hot_adapter(model))
    engine = make_engine(model, events=events, failures=failures, table=table)
    for name in ("other", "hot"):
        engine.add(replace(ask(name, (3, 4, 5), 6, model="hot"), traffic="rollout"), False)
    step(engine)
    assert caplog.text.count("a rollout ends where it is: with hot@1 the model computes numbers") == 1
    made = completions(events)["hot"]
    assert (len(made.tokens), made.finish_reason, failures) == (1, "abort", [])
    assert math.isnan(made.logprobs[0])
