"""Penalties, bias and least lengths change what is sampled as they are defined, and not the log-probs that are told."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.engine import Engine
from parallm.engine.sampling.logits_processors import IN_PROMPT, LogitsProcessors
from parallm.engine.sequence import Sequence as Row
from parallm.engine.settings import EngineSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent

Ask = Callable[..., GenerationRequest]
PROMPT = (5, 300, 17, 9, 44, 2, 8, 44)
END = 1


def row(prompt: Sequence[int], tokens: Sequence[int] = (), **fields: Any) -> Row:
    request = GenerationRequest(
        request_id="r", prompt_tokens=tuple(prompt), sampling=SamplingParams(max_tokens=99, **fields)
    )
    return Row(request=request, index=0, seed=0, adapter=None, is_streaming=False, max_tokens=99, tokens=list(tokens))


def test_penalties_follow_their_definitions() -> None:
    logits = mx.array([[2.0, -2.0, 2.0, -2.0, 1.0, 0.5]])
    asked = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    found = LogitsProcessors(frozenset()).process(logits, [row((0, 1, 1), (2, 3, 3), **asked)], [3])
    assert found is not None
    assert found.tolist() == [[1.0, -4.0, 1.0 - 0.75, -4.0 - 1.0, 1.0, 0.5]]


def test_bias_comes_before_penalties_and_only_to_the_row_that_asks() -> None:
    logits = mx.array([[1.0, 1.0, 1.0]] * 2)
    biased = row((0,), logit_bias=((0, 3.0), (2, -100.0)), repetition_penalty=2.0)
    found = LogitsProcessors(frozenset()).process(logits, [row((0,)), biased], [0, 0])
    assert found is not None
    assert found.tolist() == [[1.0, 1.0, 1.0], [2.0, 1.0, -99.0]]


def test_ends_are_forbidden_until_the_least_length() -> None:
    logits = mx.zeros((3, 5))
    rows = [row((0,), min_tokens=2, stop_token_ids=(3, 700)), row((0,), min_tokens=2, ignore_eos=True), row((0,))]
    adjustments = LogitsProcessors(frozenset({4}))
    found = adjustments.process(logits, rows, [1, 1, 1])
    assert found is not None
    assert np.isneginf(np.array(found)).astype(int).tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5]
    assert adjustments.process(logits, rows, [2, 2, 2]) is None


def test_counts_follow_their_rows_when_others_join_and_leave() -> None:
    logits = mx.zeros((3, 6))
    a, b, c = (row((0,), frequency_penalty=1.0) for _ in range(3))
    adjustments = LogitsProcessors(frozenset())
    adjustments.process(logits[:2], [a, b], [0, 0])
    adjustments.count([a, b], mx.array([1, 2]))
    adjustments.process(logits, [b, c, a], [1, 0, 1])
    adjustments.count([b, c, a], mx.array([2, 3, 4]))
    found = adjustments.process(logits[:2], [a, b], [2, 2])
    assert found is not None
    assert found.tolist() == [[0, -1, 0, 0, -1, 0], [0, 0, -2, 0, 0, 0]]
    b.tokens = [5, 5, 5]  # it has begun anew elsewhere
    found = adjustments.process(logits[:2], [a, b], [2, 3])
    assert found is not None
    assert found.tolist()[1] == [0, 0, 0, 0, 0, -3]


def test_a_token_of_a_long_prompt_is_not_counted_as_sampled() -> None:
    found = LogitsProcessors(frozenset()).process(
        mx.zeros((1, 3)), [row((1,) * 5000, (1,), frequency_penalty=1.0)], [1]
    )
    assert found is not None
    assert found.tolist() == [[0, -1, 0]]
    assert IN_PROMPT > 2**20


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"logit_bias": ((7, 5.0), (8, 5.0)), "presence_penalty": 2.0},
    {},
    {"presence_penalty": -1.0, "repetition_penalty": 0.8},
]


def logits_of(model: SharedModel, tokens: Sequence[int]) -> np.ndarray:
    hidden = model.hidden(mx.array([tokens]), model.make_cache(), None)
    return np.array(model.head(hidden[0, -1:])[0].astype(mx.float32), np.float64)


def by_definition(logits: np.ndarray, completion: Sequence[int], fields: dict[str, Any]) -> np.ndarray:
    found = logits.copy()
    for token, bias in fields.get("logit_bias", ()):
        found[token] += bias
    penalty = fields.get("repetition_penalty", 1.0)
    for token in {*PROMPT, *completion}:
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(completion):
        found[token] -= fields.get("frequency_penalty", 0) * list(completion).count(token)
        found[token] -= fields.get("presence_penalty", 0)
    return found


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("max_rows", [2, 128])
def test_greedy_completions_are_those_of_the_definition(
    max_rows: int,
    async_scheduling: bool,
    load_tiny: Callable[..., SharedModel],
    ask: Ask,
    make_engine: Callable[..., Engine],
) -> None:
    model, events = load_tiny("llama"), list[TokenEvent]()
    engine = make_engine(
        model, events=events, settings=EngineSettings(max_rows=max_rows), async_scheduling=async_scheduling
    )
    for place, fields in enumerate(FIELDS):
        engine.add(ask(f"r{place}", PROMPT, 6 + 2 * place, **fields), False)
    while engine.has_work("serving"):
        engine.step("serving")
    made = {event.request_id: event.completion for event in events}
    for place, fields in enumerate(FIELDS):
        completion = made[f"r{place}"]
        assert completion is not None
        assert len(completion.tokens) == 6 + 2 * place
        for position, token in enumerate(completion.tokens):
            logits = logits_of(model, (*PROMPT, *completion.tokens[:position]))
            wanted = by_definition(logits, completion.tokens[:position], fields)
            assert wanted[token] >= wanted.max() - 1e-4
            told = completion.logprobs[position]
            assert told == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)


def test_nothing_but_the_limit_ends_before_the_least_length(
    load_tiny: Callable[..., SharedModel], ask: Ask, complete: Callable[..., dict[str, list[Completion]]]
) -> None:
    model = load_tiny("llama")
    every = "".join(model.tokenizer.token_text(token) for token in range(2, 385))
    asked = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "n": 8, "logit_bias": ((END, 100.0),)}
    requests = [ask("end", PROMPT, 9, **asked), ask("late", PROMPT, 9, min_tokens=4, **asked)]
    requests += [ask("stop", PROMPT, 9, min_tokens=3, stop=tuple(sorted(set(every))))]
    made = complete(model, requests)
    assert {completion.tokens for completion in made["end"]} == {(END,)}
    assert {len(completion.tokens) for completion in made["late"]} == {5}
    assert all(completion.tokens[4:] == (END,) for completion in made["late"])
    assert (len(made["stop"][0].tokens), made["stop"][0].finish_reason) == (3, "stop")
