"""Versions that change under way: from which token on, over whose keys and values, and who keeps which version."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.logprobs import token_logprobs
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent, WeightSpan

Publish = Callable[[int], None]
PROMPT = (5, 300, 17, 9, 44, 2, 8)


@pytest.fixture
def model(load_tiny: Callable[..., SharedModel]) -> SharedModel:
    return load_tiny("llama")


@pytest.fixture
def table(model: SharedModel, random_adapter: Callable[..., Adapter]) -> AdapterTable:
    table = AdapterTable()
    table.publish(random_adapter(model, 1))
    return table


@pytest.fixture
def publish(model: SharedModel, table: AdapterTable, random_adapter: Callable[..., Adapter]) -> Publish:
    return lambda version: table.publish(random_adapter(model, version))


def request(name: str, *, switches: bool, n: int = 1, model: str = "policy") -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_tokens=PROMPT,
        sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        n=n,
        model=model,
        switches_in_flight=switches,
    )


def finish(engine: Engine, events: list[TokenEvent]) -> dict[str, Completion]:
    while engine.has_work("serving"):
        engine.step("serving")
    return {event.request_id: event.completion for event in events if event.completion}


def spans(*ends: tuple[int, int]) -> tuple[WeightSpan, ...]:
    starts = [0, *(end for _, end in ends[:-1])]
    return tuple(
        WeightSpan(version=version, start=start, end=end) for start, (version, end) in zip(starts, ends, strict=True)
    )


def test_a_row_goes_on_with_each_new_version_from_its_next_token(
    table: AdapterTable, publish: Publish, model: SharedModel, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, table=table)
    engine.add(request("moves", switches=True), False)
    engine.add(request("stays", switches=False), False)
    engine.add(request("pinned", switches=True, model="policy@1"), False)
    for version, units in ((2, 8), (3, 3), (4, 0), (5, 2)):
        for _ in range(units):
            engine.step("serving")
        publish(version)
    made = finish(engine, events)
    first, second, third, *more = made["moves"].weight_versions
    assert [span.version for span in (first, second, third)] == [1, 2, 4]  # no token came between 3 and 4
    assert more == [WeightSpan(version=5, start=third.end, end=12)]
    assert (second.end - second.start, third.end - third.start) == (3, 2)
    assert made["stays"].weight_versions == made["pinned"].weight_versions == spans((1, 12))


def test_after_a_switch_new_weights_read_the_old_keys_and_values(
    table: AdapterTable, publish: Publish, model: SharedModel, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, table=table)
    engine.add(request("moves", switches=True), False)
    for _ in range(6):
        engine.step("serving")
    publish(2)
    made = finish(engine, events)["moves"]
    (old, new) = made.weight_versions
    sequence, length = [*PROMPT, *made.tokens], len(PROMPT) + old.end - 1  # the newest token is not in the cache yet
    cache, hidden = model.make_cache(), []
    for version, tokens in ((1, sequence[:length]), (2, sequence[length:-1])):
        adapter = table.resolve(f"policy@{version}")
        assert adapter is not None
        lora = single_lora(adapter.arrays, lora_scaling(adapter, model))
        hidden.append(model.hidden(mx.array([tokens]), cache, lora)[0])
    logits_NV = model.head(mx.concatenate(hidden))[len(PROMPT) - 1 :]
    expected = token_logprobs(logits_NV, mx.ones(len(made.tokens)), mx.array(made.tokens))
    assert made.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert (old.version, new.version) == (1, 2)


def test_prompts_that_wait_begin_with_the_newest_version(
    table: AdapterTable, publish: Publish, model: SharedModel, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, table=table, settings=EngineSettings(max_rows=1))
    for name in ("runs", "moves"):
        engine.add(request(name, switches=True), False)
    engine.add(request("stays", switches=False), False)
    for _ in range(5):
        engine.step("serving")
    publish(2)
    made = finish(engine, events)
    assert [span.version for span in made["runs"].weight_versions] == [1, 2]
    assert made["moves"].weight_versions == spans((2, 12))
    assert made["stays"].weight_versions == spans((1, 12))


def test_a_member_that_gets_its_row_late_has_the_first_token_of_its_prompts_version(
    table: AdapterTable, publish: Publish, model: SharedModel, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, table=table, settings=EngineSettings(max_rows=1))
    engine.add(request("two", switches=True, n=2), False)
    engine.step("serving")
    publish(2)
    while engine.has_work("serving"):
        engine.step("serving")
    late = next(event.completion for event in events if event.completion and event.index == 1)
    assert late.weight_versions == spans((1, 1), (2, 12))


def test_a_version_that_all_rows_have_left_is_free(
    table: AdapterTable, publish: Publish, model: SharedModel, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, table=table)
    engine.add(request("moves", switches=True, n=3), False)
    engine.step("serving")
    engine.step("serving")
    publish(2)
    engine.step("serving")
    assert {card.version: card.num_running for card in table.cards()} == {2: 3, 1: 0}
    engine.abort("moves")
    assert [card.num_running for card in table.cards()] == [0, 0]
