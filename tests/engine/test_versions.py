"""Adapter versions in one batch: each row gets the numbers of its own version, and keeps it to its end."""

from collections.abc import Callable
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
from parallm.model.adapter import Adapter, AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

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
    for site in adapter.targets:
        layer = LoRALinear.from_base(linears[site], r=adapter.rank, scale=adapter.alpha / adapter.rank)
        layer.lora_a, layer.lora_b = adapter.arrays[f"{site}.lora_a"], adapter.arrays[f"{site}.lora_b"]
        wrapped.append((site, layer))
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


def test_a_version_with_another_rank_shares_a_batch(
    model: SharedModel, random_adapter: RandomAdapter, ask: Ask, complete: Complete
) -> None:
    table = AdapterTable()
    table.publish(random_adapter(model, 1, rank=4))
    table.publish(random_adapter(model, 2, rank=2))
    requests = [ask(name, PROMPT, 10, model=name) for name in ("policy@1", "policy@2", "base")]
    together = complete(model, requests, table=table)
    for request in requests:
        alone = complete(model, [request], table=table)[request.request_id][0]
        assert together[request.request_id][0].tokens == alone.tokens
        assert together[request.request_id][0].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
