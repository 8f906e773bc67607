"""Models whose layers keep states: rows that share steps, join, leave, fork and are preempted are rows alone.

Alone a sequence has the engine to itself. Steps see each row by itself, so that all bits are equal with a BLAS that
computes a row alike in any company. A preempted sequence is computed again in chunks, by sums of another order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine import state_trial
from parallm.engine.decode_batch import SequentialDecodeBatch, SlotDecodeBatch
from parallm.engine.engine import Engine
from parallm.engine.kv.state_cache import StateCache
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent
from tests.engine.conftest import by_request, step
from tests.tiny_models import HYBRIDS

FAMILIES = sorted(set(HYBRIDS) - {"gear"})  # transformers' configuration refuses its kinds of layers
ALWAYS = ("falcon_h1", "jamba", "kimi_linear", "lfm2", "qwen3_5", "rwkv7")
"""One of each kind of state; the others are slow."""
MAX_LENGTH = 14

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]
LoadTiny = Callable[..., SharedModel]
MakeEngine = Callable[..., Engine]


def families() -> list[object]:
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in FAMILIES]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [[int(token) for token in random.integers(2, 385, 1 + 5 * place % 37)] for place in range(20)]


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[[str], Path]) -> Callable[..., tuple[int, ...]]:
    """mlx-lm's greedy tokens after a prompt, from a plain model of its own."""
    models = cache(lambda architecture: load_model(tiny_model(architecture))[0])

    def generate(architecture: str, prompt: Sequence[int]) -> tuple[int, ...]:
        steps = generate_step(mx.array(prompt), models(architecture), max_tokens=MAX_LENGTH)
        return tuple(int(token) for token, _ in steps)

    return generate


def ragged(ask: Ask, prompts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    """32 rows: of 20 requests every third one has two more completions, and all end at different lengths."""
    return [
        ask(
            f"r{place}",
            prompt,
            3 + place * 5 % (MAX_LENGTH - 2),
            n=3 if place % 3 == 0 and place < 18 else 1,
            temperature=0.8,
            seed=place,
        )
        for place, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("architecture", families())
def test_rows_that_share_steps_are_rows_alone(
    architecture: str,
    load_tiny: LoadTiny,
    prompts: list[list[int]],
    ask: Ask,
    complete: Complete,
    record_property: Callable[[str, object], None],
) -> None:
    model, requests = load_tiny(architecture), ragged(ask, prompts)
    alone: dict[str, list[Completion]] = {}
    for request in requests:
        alone |= complete(model, [request], settings=EngineSettings(max_rows=1))
    estimates = []
    for apart in (0, 1):  # prompts that share forwards, and rows that join one after the other
        together = complete(model, requests, apart=apart, settings=EngineSettings(max_rows=32))
        assert sum(map(len, together.values())) == 32
        check(together, alone, is_exact=True)
        estimates.append(k3(together, alone))
    record_property("hybrid.families_exact" if is_strict() else "hybrid.families_alike", 1)
    record_property("hybrid.families_k3", max(estimates))


def test_a_state_that_is_not_its_rows_gives_other_tokens(
    load_tiny: LoadTiny, prompts: list[list[int]], ask: Ask, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rows keep their states where others leave."""
    model, requests = load_tiny("qwen3_5"), ragged(ask, prompts)
    expected = complete(model, requests, apart=1, settings=EngineSettings(max_rows=32))
    monkeypatch.setattr(StateCache, "leave", lambda *_: None)
    monkeypatch.setattr("parallm.engine.decode_batch.shares_steps", lambda _: True)  # the trial sees it
    with pytest.raises(AssertionError):
        check(complete(model, requests, apart=1, settings=EngineSettings(max_rows=32)), expected, is_exact=False)


def is_strict() -> bool:
    """Whether a row is computed to the same bits in any company."""
    return load_blas(DeviceSettings()).strict and mx.default_device() == mx.Device(mx.cpu)


def k3(found: Mapping[str, Sequence[Completion]], expected: Mapping[str, Sequence[Completion]]) -> float:
    """Estimate of KL(found || expected) by tokens that `found` sampled (http://joschu.net/blog/kl-approx.html)."""
    pairs = [pair for name, completions in found.items() for pair in zip(completions, expected[name], strict=True)]
    ratios = np.concatenate([np.array(other.logprobs) - np.array(one.logprobs) for one, other in pairs])
    return float((np.expm1(ratios) - ratios).mean())


def check(
    found: Mapping[str, Sequence[Completion]], expected: Mapping[str, Sequence[Completion]], *, is_exact: bool
) -> None:
    """Equal tokens, and log-probs that are equal to the bit or nearly equal."""
    assert found.keys() == expected.keys()
    strict = is_exact and is_strict()
    for name, completions in found.items():
        for one, other in zip(completions, expected[name], strict=True):
            assert one.tokens == other.tokens
            assert np.abs(np.array(one.logprobs) - np.array(other.logprobs)).max() <= (0 if strict else 1e-4)


@pytest.mark.parametrize("architecture", families())
def test_requests_that_come_and_go_get_the_tokens_of_mlx_lm(
    architecture: str,
    load_tiny: LoadTiny,
    prompts: list[list[int]],
    reference: Callable[..., tuple[int, ...]],
    ask: Ask,
    complete: Complete,
) -> None:
    requests = [ask(f"r{place}", prompt, 3 + place * 5 % 12) for place, prompt in enumerate(prompts)]
    found = complete(load_tiny(architecture), requests, apart=1, settings=EngineSettings(prefill_chunk=16))
    for request in requests:
        expected = reference(architecture, request.prompt_tokens)
        assert found[request.request_id][0].tokens == expected[: request.sampling.max_tokens]


@pytest.mark.parametrize("architecture", families())
def test_sequences_that_are_preempted_get_the_tokens_that_they_get_alone(
    architecture: str, load_tiny: LoadTiny, prompts: list[list[int]], ask: Ask, make_engine: MakeEngine
) -> None:
    model = load_tiny(architecture)
    requests = [
        replace(request, traffic="serving" if place % 4 == 3 else "rollout")
        for place, request in enumerate(ragged(ask, prompts))
    ]
    expected, _ = run(make_engine, model, requests, EngineSettings())
    cost = make_engine(model).kv_budget.cost
    settings = EngineSettings(kv_cache_bytes=20 * cost.of(48), prefix_cache=False)
    found, engine = run(make_engine, model, requests, settings)
    assert engine.scheduler.num_preempted > 0
    check(found, expected, is_exact=False)


@pytest.mark.parametrize("architecture", ["mamba", "qwen3_5"])
def test_rows_of_several_versions_share_steps(
    architecture: str,
    load_tiny: LoadTiny,
    prompts: list[list[int]],
    ask: Ask,
    complete: Complete,
    random_adapter: Callable[..., Adapter],
) -> None:
    model, table = load_tiny(architecture), AdapterTable()
    for name in ("one", "two"):
        table.publish(random_adapter(model, 1 + len(name), name=name))
    names = ("one", "two", "base")
    requests = [ask(f"r{place}", prompt, 9, model=names[place % 3]) for place, prompt in enumerate(prompts[:9])]
    alone: dict[str, list[Completion]] = {}
    for request in requests:
        alone |= complete(model, [request], table=table)
    check(complete(model, requests, table=table, apart=1), alone, is_exact=False)


def test_a_model_whose_states_cannot_be_shared_runs_row_by_row_and_says_why(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make_engine: MakeEngine
) -> None:
    model = load_tiny("lfm2")
    batch = make_engine(model).memory.make_batch()
    assert isinstance(batch, SlotDecodeBatch)
    # as if the layers kept what belongs to the step before
    monkeypatch.setattr(StateCache, "__setitem__", lambda *_: None)
    with caplog.at_level("INFO", state_trial.__name__):
        batch = make_engine(model).memory.make_batch()
    assert isinstance(batch, SequentialDecodeBatch)
    assert "runs row by row: hidden states of rows together differ by" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_allows_what_rounding_changes_and_no_state_of_another_row(
    dtype: Literal["float32", "bfloat16"], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_shared_model(ModelSettings(path=str(tiny_model("qwen3_5")), dtype=dtype))
    error, allowed = state_trial.measure(model)
    assert error <= allowed
    monkeypatch.setattr(state_trial, "_at_once", lambda _: [2 * hidden for hidden in state_trial._alone(model)])
    assert state_trial.measure(model)[1] == state_trial.MAX_ALLOWED
    at_once = [1.03125 * hidden for hidden in state_trial._alone(model)]
    monkeypatch.setattr(state_trial, "_at_once", lambda _: at_once)
    assert state_trial.measure(model)[1] == pytest.approx(0.125, rel=0.1)
    monkeypatch.setattr(StateCache, "leave", lambda *_: None)
    error, allowed = state_trial.measure(model)
    assert error > 2 * allowed
    assert not state_trial.shares_steps(model)


@pytest.mark.parametrize("architecture", ["gemma2", "longcat_flash_ngram"])
def test_a_model_of_other_caches_runs_row_by_row_and_says_why(
    architecture: str, load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture, make_engine: MakeEngine
) -> None:
    with caplog.at_level("INFO", state_trial.__name__):
        batch = make_engine(load_tiny(architecture)).memory.make_batch()
    assert isinstance(batch, SequentialDecodeBatch)
    assert f"runs row by row: rows of {architecture}" in caplog.text


@pytest.mark.parametrize(("architecture", "pads"), [("kimi_linear", True), ("mamba2", True), ("jamba", False)])
def test_a_trial_says_whether_prompts_share_a_forward(
    architecture: str, pads: bool, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(architecture)
    assert state_trial.pads_prompts(model) == pads
    monkeypatch.setattr(state_trial, "padding", lambda *_: nullcontext())  # states after the padding
    assert not state_trial.pads_prompts(model)


def test_prompts_of_rows_that_run_alone_are_computed_alone(
    load_tiny: LoadTiny, prompts: list[list[int]], ask: Ask, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = load_tiny("qwen3_5"), ragged(ask, prompts)[:4]
    together = complete(model, requests)
    monkeypatch.setattr("parallm.engine.decode_batch.shares_steps", lambda _: False)
    check(complete(model, requests), together, is_exact=False)


def run(
    make_engine: MakeEngine, model: SharedModel, requests: Sequence[GenerationRequest], settings: EngineSettings
) -> tuple[dict[str, list[Completion]], Engine]:
    """All completions by request, where serving comes when rollouts hold all memory, and the engine."""
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, settings=settings)
    for traffic in ("rollout", "serving"):
        for request in requests:
            if request.traffic == traffic:
                engine.add(request, False)
        for _ in range(12):
            step(engine)
    while step(engine):
        pass
    return by_request(requests, events), engine
