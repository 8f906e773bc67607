"""Log-probs of prompts, which are computed in chunks, equal those of one forward over the whole prompt."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.engine import Engine
from parallm.engine.sampling import sampler
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]


def prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(2, 385, length)]


def direct(model: SharedModel, tokens: list[int], temperature: float, lora: Any = None) -> np.ndarray:
    """Log-probs of all tokens behind each position, (T, V)."""
    logits = model.head(model.hidden(mx.array([tokens]), model.make_cache(), lora)[0])
    scaled = np.array(logits.astype(mx.float32), np.float64) / temperature
    return np.asarray(scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True)))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100])
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_they_equal_the_direct_computation(
    architecture: str, length: int, load_tiny: Callable[..., SharedModel], ask: Ask, complete: Complete
) -> None:
    model, tokens = load_tiny(architecture), prompt(length)
    request = ask("a", tokens, 3, n=2, prompt_logprobs=4, temperature=0.5, seed=1)
    first, second = complete(model, [request], settings=EngineSettings(prefill_chunk=16))["a"]
    told = first.prompt_logprobs
    assert told is not None
    assert second.prompt_logprobs == told
    assert (len(told), told[0]) == (length, None)
    wanted = direct(model, tokens, 0.5)
    for place, one in enumerate(told[1:]):
        assert one is not None
        row = wanted[place]
        assert one.token == tokens[place + 1]
        assert one.logprob == pytest.approx(row[one.token], abs=1e-5)
        assert one.rank == 1 + (row > row[one.token] + 1e-9).sum()
        assert [top.logprob for top in one.top] == pytest.approx(sorted(row, reverse=True)[:4], abs=1e-5)


def test_they_are_those_of_the_version_that_is_asked(
    load_tiny: Callable[..., SharedModel], ask: Ask, complete: Complete, random_adapter: Callable[..., Adapter]
) -> None:
    model, tokens, table = load_tiny("llama"), prompt(20), AdapterTable()
    adapter = random_adapter(model, 1)
    table.publish(adapter)
    (made,) = complete(model, [ask("a", tokens, 1, prompt_logprobs=0)], table=table)["a"]
    wanted = direct(model, tokens, 1.0, single_lora(adapter.arrays, lora_scaling(adapter, model)))
    assert made.prompt_logprobs is not None
    told = [one.logprob for one in made.prompt_logprobs if one is not None]
    assert told == pytest.approx([wanted[place, token] for place, token in enumerate(tokens[1:])], abs=1e-5)
    assert all(one is None or one.top == () for one in made.prompt_logprobs)


def test_no_more_logits_exist_at_once_than_the_limit(
    load_tiny: Callable[..., SharedModel], ask: Ask, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes, head = load_tiny("llama"), list[int](), SharedModel.head

    def counted(self: SharedModel, hidden_NH: mx.array) -> mx.array:
        sizes.append(hidden_NH.shape[0])
        return head(self, hidden_NH)

    monkeypatch.setattr(SharedModel, "head", counted)
    monkeypatch.setattr(sampler, "MAX_POSITIONS", 16)
    (made,) = complete(model, [ask("a", prompt(50), 1, prompt_logprobs=0)])["a"]
    assert sizes == [16, 16, 16, 1, 1]
    assert made.prompt_logprobs is not None
    wanted = direct(model, prompt(50), 1.0)
    told = [one.logprob for one in made.prompt_logprobs if one is not None]
    assert told == pytest.approx([wanted[place, token] for place, token in enumerate(prompt(50)[1:])], abs=1e-5)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_without_tokens_to_sample_a_completion_is_its_prompt(
    async_scheduling: bool, load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    events: list[TokenEvent] = []
    model, table = load_tiny("llama"), AdapterTable()
    engine = make_engine(
        model, events=events, async_scheduling=async_scheduling, settings=EngineSettings(max_rows=2), table=table
    )
    engine.add(ask("before", prompt(5), 6), False)
    for name in ("a", "b", "c"):
        engine.add(ask(name, prompt(9), 0, n=2, prompt_logprobs=1), name == "b")
    engine.add(ask("behind", prompt(5), 6), False)
    while engine.has_work("serving"):
        engine.step("serving")
    assert (engine.num_running(), engine.num_waiting()) == (0, 0)
    made = {(event.request_id, event.index): event.completion for event in events}
    for name in ("a", "b", "c"):
        for index in range(2):
            completion = made[name, index]
            assert completion is not None
            assert (completion.tokens, completion.text, completion.finish_reason) == ((), "", "length")
            assert completion.prompt_logprobs is not None
            assert len(completion.prompt_logprobs) == 9
    before, behind = made["before", 0], made["behind", 0]
    assert before is not None
    assert behind is not None
    assert before.tokens == behind.tokens
    assert before.prompt_logprobs is None
    assert len(before.tokens) == 6
