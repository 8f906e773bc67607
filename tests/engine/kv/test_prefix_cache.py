"""A prompt that begins like another one is computed from where they part, and nobody's numbers change."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.engine import Engine
from parallm.engine.kv.prefix_cache import Owner, PrefixCache
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]
LoadTiny = Callable[..., SharedModel]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
BASE = Owner("", 0, "")
PER_TOKEN = 8  # of the caches that are not an engine's: one layer, one head, keys and values of one float32


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def add(cache: PrefixCache, tokens: Sequence[int], owner: Owner = BASE, scheduler: int = 10**9) -> int:
    """Keep `tokens` as their own keys and values; how many of them were new."""

    def make(start: int, end: int) -> list[mx.array]:
        return [mx.array(tokens[start:end], mx.float32).reshape(1, 1, -1, 1)] * 2

    made = cache.add(owner, tokens, make, PER_TOKEN, scheduler)
    return made[0].shape[2] if made else 0


def found(cache: PrefixCache, tokens: Sequence[int], owner: Owner = BASE) -> list[int]:
    hit = cache.match(owner, tokens, len(tokens))
    if hit is None:
        return []
    keys, values = hit.arrays()
    assert keys.shape == values.shape == (1, 1, hit.num_tokens, 1)
    return [int(token) for token in keys.reshape(-1).tolist()]


def test_prompts_share_their_common_blocks() -> None:
    cache = PrefixCache(10**6)
    first, second = [*range(64), *range(100, 140)], [*range(64), *range(200, 240)]
    assert [add(cache, first), add(cache, second), add(cache, second)] == [96, 32, 0]
    assert cache.nbytes == 128 * PER_TOKEN
    assert found(cache, [*first, 1, 2]) == first[:96]
    assert found(cache, second[:90]) == second[:80]
    assert found(cache, [*range(40)]) == [*range(32)]
    assert found(cache, [7, *range(40)]) == []
    assert (cache.num_lookups, cache.num_hits) == (4, 3)


def test_what_was_used_last_stays_and_no_beginning_goes_before_its_end() -> None:
    cache = PrefixCache(96 * PER_TOKEN)
    common, first, second = [*range(32)], [*range(100, 132)], [*range(200, 232)]
    add(cache, common)
    add(cache, [*common, *first])
    add(cache, [*common, *second])
    assert found(cache, [*common, *first]) == [*common, *first]
    assert add(cache, [*range(300, 332)]) == 32
    assert found(cache, [*common, *second]) == common
    assert found(cache, [*common, *first]) == [*common, *first]
    assert add(cache, [*range(500)]) == 0, "more than all of it"
    assert add(cache, [*range(400, 432)], scheduler=0) == 32
    assert cache.nbytes == 96 * PER_TOKEN
    assert cache.shrink(10**6) is False
    assert (cache.nbytes, found(cache, common)) == (0, [])


def test_versions_that_are_gone_leave_nothing() -> None:
    cache = PrefixCache(10**6)
    owners = [Owner("policy", 1, ""), Owner("policy", 2, ""), Owner("", 0, "me")]
    for owner in owners:
        add(cache, [*range(32)], owner)
    assert found(cache, [*range(32)]) == []
    cache.forget(lambda name, version: (name, version) == ("policy", 2))
    assert [len(found(cache, [*range(32)], owner)) for owner in owners] == [0, 32, 32]
    assert cache.nbytes == 64 * PER_TOKEN


def play(engine: Engine, events: list[TokenEvent], *requests: GenerationRequest) -> list[Completion]:
    for request in requests:
        engine.add(request, False)
        while engine.has_work(request.traffic):
            engine.step(request.traffic)
    return [event.completion for event in events if event.completion is not None]


ALWAYS = {("llama", False), ("llama", True), ("gemma3_text", True), ("gpt2", False)}
"""Architectures, and whether scheduling is asynchronous: the others differ from these in what no cache sees."""
ARCHITECTURES = ("llama", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "granite", "gpt2")


@needs_strict
@pytest.mark.parametrize(
    ("architecture", "async_scheduling"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
        for case in product(ARCHITECTURES, (False, True))
    ],
)
def test_what_is_known_is_not_computed_and_nobody_gets_other_bits(
    architecture: str, async_scheduling: bool, load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    common = prompt(1, 70)
    sampling: dict[str, Any] = {"temperature": 1.0, "n": 2}
    requests = [ask(f"r{i}", [*common[: 70 - 9 * i], *prompt(i, 3 + 5 * i)], 20, seed=i, **sampling) for i in range(5)]
    made: list[list[Completion]] = []
    for prefix_cache in (False, True):
        settings, events = EngineSettings(prefix_cache=prefix_cache, prefill_chunk=32), list[TokenEvent]()
        engine = make_engine(
            load_tiny(architecture), events=events, settings=settings, async_scheduling=async_scheduling
        )
        made.append(play(engine, events, *requests))
    assert made[0] == made[1]
    assert [one.num_cached_prompt_tokens for one in made[0]] == [0] * 10
    assert [one.num_cached_prompt_tokens for one in made[1]] == [0, 0, 48, 48, 48, 48, 32, 32, 32, 32]
    assert (engine.prefill.num_prompt_tokens, engine.prefill.num_cached_tokens) == (
        73 + 69 + 65 + 61 + 57,
        48 + 48 + 32 + 32,
    )


@needs_strict
def test_the_next_turn_of_a_conversation_computes_what_is_new(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    model, turns = load_tiny("llama"), prompt(5, 37)
    events: list[TokenEvent] = []
    engine, cached = make_engine(model, events=events), []
    for turn in range(4):
        request = ask(f"t{turn}", turns, 30, temperature=1.0, seed=turn)
        last = play(engine, events, request)[-1]
        other: list[TokenEvent] = []
        alone = play(make_engine(model, events=other, settings=EngineSettings(prefix_cache=False)), other, request)
        assert last == alone[0]
        cached.append(last.num_cached_prompt_tokens)
        turns = [*turns, *last.tokens, *prompt(turn, 8)]
    # of 37, 75, 113 and 151 tokens; the last token that was sampled is not among what the turn before has computed
    assert cached == [0, 64, 96, 128 + 0]


@needs_strict
def test_versions_and_salts_share_nothing(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, random_adapter: Callable[..., Adapter]
) -> None:
    model, events, table = load_tiny("llama"), list[TokenEvent](), AdapterTable(keep=1)
    table.publish(random_adapter(model, 1))
    engine = make_engine(model, events=events, table=table)
    tokens = prompt(1, 50)

    def cached(name: str, model: str = "policy", cache_salt: str = "") -> int:
        request = replace(ask(name, tokens, 3, model=model), cache_salt=cache_salt)
        return play(engine, events, request)[-1].num_cached_prompt_tokens

    assert [cached("a"), cached("b"), cached("c", model="base"), cached("d", cache_salt="me")] == [0, 32, 0, 0]
    assert [cached("e", cache_salt="me"), cached("f", model="base")] == [32, 32]
    one = engine.memory.prefixes.nbytes
    table.publish(random_adapter(model, 2))
    table.publish(random_adapter(model, 3))
    assert [cached("g"), cached("h")] == [0, 32]
    assert engine.memory.prefixes.nbytes == one // 3 * 2, "of the base and of version 3; version 1 is gone"


@needs_strict
def test_what_several_versions_have_computed_is_nobodys_beginning(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, random_adapter: Callable[..., Adapter]
) -> None:
    model, events, table = load_tiny("llama"), list[TokenEvent](), AdapterTable()
    table.publish(random_adapter(model, 1))
    engine = make_engine(model, events=events, table=table)
    engine.add(replace(ask("a", prompt(1, 30), 60), switches_in_flight=True), False)
    for _ in range(12):
        engine.step("serving")
    table.publish(random_adapter(model, 2))
    made = play(engine, events)
    while engine.has_work("serving"):
        engine.step("serving")
    made = [event.completion for event in events if event.completion is not None]
    end = made[0].weight_versions[0].end
    assert 5 < end < 15
    follow = [*prompt(1, 30), *made[0].tokens]
    assert _known(engine, follow, version=1) == (30 + end - 1) // 16 * 16
    assert _known(engine, follow, version=2) == 0


def _known(engine: Engine, tokens: Sequence[int], version: int) -> int:
    assert isinstance(engine.memory.prefixes, PrefixCache)
    hit = engine.memory.prefixes.match(Owner("policy", version, ""), tokens, len(tokens))
    return 0 if hit is None else hit.num_tokens


def test_log_probs_of_a_prompt_are_those_of_all_of_it(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("llama"), events=events)
    plain, *scored = (ask(name, prompt(1, 40), 3, prompt_logprobs=asked) for name, asked in (("a", None), ("b", 1)))
    made = play(engine, events, plain, *scored)
    assert made[1].prompt_logprobs is not None
    assert (len(made[1].prompt_logprobs), made[1].num_cached_prompt_tokens) == (40, 0)


@pytest.mark.parametrize("architecture", ["mamba", "gemma2"])
def test_rows_that_run_one_by_one_share_nothing(
    architecture: str, load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine
) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny(architecture), events=events)
    made = play(engine, events, *(ask(name, prompt(1, 40), 5) for name in "ab"))
    assert [one.num_cached_prompt_tokens for one in made] == [0, 0]
    assert made[0].tokens == made[1].tokens
    assert engine.kv_budget.used == 0


@needs_strict
def test_rows_take_back_what_is_kept_for_later(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("llama"), events=events, settings=EngineSettings(kv_cache_bytes=5 * 112 * 512))
    most = 0
    for index in range(12):
        play(engine, events, ask(f"r{index}", prompt(index, 64), 30))
        most = max(most, engine.memory.prefixes.nbytes)
        assert engine.kv_budget.used <= engine.kv_budget.limit
    assert most == 2 * 80 * 512, "what four slots of 96 positions leave of it"
    assert engine.scheduler.num_preempted == 0
