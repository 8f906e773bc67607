"""Adapter versions in one batch: each row gets the numbers of its own version, and keeps it to its end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.engine import Engine
from parallm.errors import InvalidRequest
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.logprobs import token_logprobs
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TaskSpec, TokenEvent

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]
RandomAdapter = Callable[..., Adapter]

BLAS = load_blas(DeviceSettings())
MODELS = ["base", *(f"policy@{version}" for version in range(1, 9))]
PROMPT = (5, 300, 17, 9, 44, 2, 8)


@pytest.fixture
def model(load_tiny: Callable[..., SharedModel]) -> SharedModel:
    return load_tiny("llama")


@pytest.fixture
def table(model: SharedModel, random_adapter: RandomAdapter) -> AdapterTable:
    filled = AdapterTable(keep=8)
    for version in range(1, 9):
        filled.publish(random_adapter(model, version))
    return filled


def prompt(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, 4 + seed % 9)]


@pytest.mark.cpu
@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize("apart", [0, 1])
def test_thirty_two_rows_of_nine_versions_equal_separate_runs(
    apart: int, model: SharedModel, table: AdapterTable, ask: Ask, complete: Complete
) -> None:
    requests = [ask(f"r{i}", prompt(i), 10, model=MODELS[i % 9], temperature=0.7, seed=i) for i in range(32)]
    together = complete(model, requests, table=table, apart=apart)
    for request in requests:
        assert complete(model, [request], table=table) == {request.request_id: together[request.request_id]}
    versions = [together[f"r{i}"][0].weight_versions[0].version for i in range(9)]
    assert versions == list(range(9))
    assert [card.num_running for card in table.cards()] == [0] * 8


@pytest.mark.cpu
@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
def test_so_they_do_with_lora_on_experts(
    load_tiny: Callable[..., SharedModel], random_adapter: RandomAdapter, ask: Ask, complete: Complete
) -> None:
    mixture, table = load_tiny("qwen3_moe", targets=("all-linear", "experts")), AdapterTable(keep=4)
    for version in range(1, 5):
        table.publish(random_adapter(mixture, version, rank=3 + version))
    names = MODELS[:5]
    requests = [ask(f"r{i}", prompt(i), 10, model=names[i % 5], temperature=0.7, seed=i) for i in range(40)]
    together = complete(mixture, requests, table=table, apart=1)
    for request in requests[:10]:
        assert complete(mixture, [request], table=table) == {request.request_id: together[request.request_id]}
    assert len({together[f"r{i}"][0].tokens for i in range(0, 40, 8)}) == 5


def test_versions_give_the_tokens_and_log_probabilities_of_mlx_lm(
    model: SharedModel, table: AdapterTable, tiny_model: Callable[[str], Path], ask: Ask, complete: Complete
) -> None:
    made = complete(model, [ask(name, PROMPT, 10, model=name) for name in MODELS], table=table)
    assert len({made[name][0].tokens for name in MODELS}) == 9
    for name in MODELS:
        adapter = table.resolve(name)
        plain = plain_model(tiny_model("llama"), adapter)
        steps = list(generate_step(mx.array(PROMPT), plain, max_tokens=10))
        assert made[name][0].tokens == tuple(int(token) for token, _ in steps)
        logprobs = [logprobs[int(token)].item() for token, logprobs in steps]
        assert made[name][0].logprobs == pytest.approx(logprobs, abs=1e-4)


def plain_model(folder: Path, adapter: Adapter | None) -> object:
    """mlx-lm's own model with mlx-lm's own LoRA layers."""
    plain, _ = load_model(folder)
    if adapter is None:
        return plain
    linears, wrapped = dict(plain.named_modules()), []
    for target in adapter.targets:
        layer = LoRALinear.from_base(linears[target], r=adapter.rank, scale=adapter.alpha / adapter.rank)
        layer.lora_a, layer.lora_b = adapter.arrays[f"{target}.lora_a"], adapter.arrays[f"{target}.lora_b"]
        wrapped.append((target, layer))
    plain.update_modules(tree_unflatten(wrapped))
    return plain


def test_a_version_published_in_mid_flight_leaves_running_rows_on_theirs(
    model: SharedModel,
    random_adapter: RandomAdapter,
    ask: Ask,
    complete: Complete,
    make_engine: Callable[..., Engine],
) -> None:
    table, events = AdapterTable(keep=1), list[TokenEvent]()
    table.publish(random_adapter(model, 1))
    expected = complete(model, [ask("old", PROMPT, 12)], table=table)["old"][0]
    engine = make_engine(model, events=events, table=table)
    engine.add(ask("old", PROMPT, 12), False)
    for _ in range(5):
        engine.step("serving")
    for version in range(2, 6):
        table.publish(random_adapter(model, version))
    assert [(card.version, card.num_running) for card in table.cards()] == [(5, 0), (1, 1)]
    engine.add(ask("new", PROMPT, 12), False)
    while engine.has_work("serving"):
        engine.step("serving")
    made = {event.request_id: event.completion for event in events}
    assert made["old"] == expected
    assert made["new"] == complete(model, [ask("new", PROMPT, 12)], table=table)["new"][0]
    assert [(card.version, card.num_running) for card in table.cards()] == [(5, 0)]


def test_rows_of_a_version_that_is_rolled_back_finish_on_it_and_new_requests_get_the_older_one(
    model: SharedModel,
    random_adapter: RandomAdapter,
    ask: Ask,
    complete: Complete,
    make_engine: Callable[..., Engine],
) -> None:
    table, events = AdapterTable(keep=1), list[TokenEvent]()
    table.publish(random_adapter(model, 1))
    good = complete(model, [ask("after", PROMPT, 12)], table=table)["after"][0]
    running = table.resolve("policy")
    table.acquire(running)  # keeps version 1 in memory while version 2 is served
    table.publish(random_adapter(model, 2))
    bad = complete(model, [ask("before", PROMPT, 12)], table=table)["before"][0]
    engine = make_engine(model, events=events, table=table)
    engine.add(ask("before", PROMPT, 12), False)
    for _ in range(5):
        engine.step("serving")
    table.promote(1)
    engine.add(ask("after", PROMPT, 12), False)
    while engine.has_work("serving"):
        engine.step("serving")
    made = {event.request_id: event.completion for event in events}
    assert (made["before"], made["after"]) == (bad, good)
    assert good.tokens != bad.tokens


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_references_go_back_to_zero_however_a_request_ends(
    end: str, model: SharedModel, table: AdapterTable, ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, table=table)
    engine.add(ask("a", PROMPT, 50, n=3, model="policy@2"), False)
    engine.add(ask("b", PROMPT, 50, n=200, model="policy@3"), False)
    for _ in range(6):
        engine.step("serving")
    assert {card.version: card.num_running for card in table.cards() if card.num_running} == {2: 3, 3: 200}
    if end == "abort":
        engine.abort("a")
        engine.abort("b")
    else:
        engine.fail("serving", ValueError("broken"))
    assert [card.num_running for card in table.cards()] == [0] * 8


FORMS: list[dict[str, object]] = [
    {"rank": 2},
    {"rank": 3, "dora": True},
    {"rank": 20, "rslora": True},
    {"rank": 1, "dora": True, "rslora": True},
]


@pytest.mark.cpu
@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize("apart", [0, 2])
def test_versions_of_lora_and_dora_and_different_ranks_share_a_batch_to_the_bit(
    apart: int, model: SharedModel, random_adapter: RandomAdapter, ask: Ask, complete: Complete
) -> None:
    table = AdapterTable()
    for version, form in enumerate(FORMS, 1):
        table.publish(random_adapter(model, version, **form))
    requests = [ask(f"r{i}", prompt(i), 10, model=MODELS[i % 5], temperature=0.7, seed=i) for i in range(20)]
    together = complete(model, requests, table=table, apart=apart)
    assert len({together[f"r{i}"][0].tokens for i in range(20)}) == 20
    for request in requests:
        assert complete(model, [request], table=table) == {request.request_id: together[request.request_id]}


@pytest.mark.cpu
@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decoding_with_any_form_of_adapter_gives_the_bits_of_the_full_forward(
    form: dict[str, object], model: SharedModel, random_adapter: RandomAdapter, ask: Ask, complete: Complete
) -> None:
    adapter, table = random_adapter(model, 1, **form), AdapterTable()
    table.publish(adapter)
    requests = [ask(f"r{i}", prompt(i), 20, model="policy" if i % 3 else "base", seed=i) for i in range(7)]
    made = complete(model, requests, table=table, apart=1)
    for request in requests[1:3]:
        completion = made[request.request_id][0]
        tokens = mx.array([request.prompt_tokens + completion.tokens[:-1]])
        lora = single_lora(adapter.arrays, lora_scaling(adapter, model))
        hidden = model.hidden(tokens, model.make_cache(), lora)[0, len(request.prompt_tokens) - 1 :]
        logprobs = token_logprobs(model.head(hidden), mx.full((20,), 1.0), mx.array(completion.tokens))
        assert tuple(logprobs.tolist()) == completion.logprobs


def test_the_norms_of_dora_are_computed_once_for_all_steps_of_a_version(
    model: SharedModel,
    random_adapter: RandomAdapter,
    ask: Ask,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = []

    def counted(adapter: Adapter, base: SharedModel) -> LoraScaling:
        computed.append(adapter.version)
        return lora_scaling(adapter, base)

    monkeypatch.setattr("parallm.model.lora.selector.lora_scaling", counted)
    table = AdapterTable()
    for version in (1, 2):
        table.publish(random_adapter(model, version, dora=True))
    engine = make_engine(model, table=table)
    for name in ("policy@1", "policy@2", "base"):
        engine.add(ask(name, PROMPT, 30, model=name), False)
    while engine.has_work("serving"):
        engine.step("serving")
    assert sorted(computed) == [1, 2]


@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
def test_equal_versions_of_several_names_share_a_batch_and_stay_apart(
    model: SharedModel, random_adapter: RandomAdapter, ask: Ask, complete: Complete
) -> None:
    table = AdapterTable(policies=("poet", "coder", "idle"))
    # the same version number under both names, with other arrays
    for version, form in enumerate(({"rank": 2}, {"rank": 6, "dora": True}), 1):
        table.publish(replace(random_adapter(model, version, **form, name="poet"), version=version))
        table.publish(replace(random_adapter(model, version + 10, **form, name="coder"), version=version))
    table.set_alias("best", 1, name="coder")
    names = ["poet", "coder", "poet@1", "coder@1", "coder@best", "idle", "base"]
    requests = [ask(name, PROMPT, 12, model=name) for name in names]
    together = complete(model, requests, table=table)
    assert [together[name][0].weight_versions[0].version for name in names] == [2, 2, 1, 1, 1, 0, 0]
    assert len({together[name][0].tokens for name in names}) == 5
    assert together["coder@1"][0].tokens == together["coder@best"][0].tokens
    for request in requests:
        assert complete(model, [request], table=table) == {request.request_id: together[request.request_id]}


def test_text_of_an_adapter_that_makes_vectors_is_refused_with_the_route_that_fits(
    model: SharedModel, table: AdapterTable, ask: Ask, complete: Complete
) -> None:
    task = TaskSpec(pooling=("mean",), source="test")
    embedder = replace(table.resolve("policy") or pytest.fail("published above"), name="embedder", task=task)
    table.publish(embedder)
    with pytest.raises(InvalidRequest, match="/v1/embeddings"):
        complete(model, [ask("r0", prompt(0), 4, model="embedder")], table=table)
    assert complete(model, [ask("r1", prompt(0), 4, model="policy")], table=table)
