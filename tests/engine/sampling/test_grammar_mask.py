"""Rows with a grammar get allowed tokens only, whatever runs beside them and however the engine steps."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.conversation import GrammarSource
from parallm.engine.engine import Engine
from parallm.engine.sampling.logits_processors import masked
from parallm.engine.sampling.sampler import row_sampling, sample
from parallm.engine.settings import EngineSettings
from parallm.errors import InvalidRequest
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent

Ask = Callable[..., GenerationRequest]
PROMPT = (5, 300, 17, 9, 44, 2, 8)
VOCABULARY_SIZE = 385


def bits(tokens: Sequence[int]) -> bytes:
    is_allowed = np.zeros(VOCABULARY_SIZE, np.uint8)
    is_allowed[list(tokens)] = 1
    return np.packbits(is_allowed, bitorder="little").tobytes()


@dataclass(frozen=True)
class OneOfEach:
    """Place i of the text is one of `choices[i]`; there is nothing behind the last."""

    choices: tuple[tuple[int, ...], ...]

    def start(self) -> "Place":
        return Place(self.choices)


@dataclass
class Place:
    choices: tuple[tuple[int, ...], ...]
    accepted: list[int] = field(default_factory=list)

    def allowed(self) -> bytes:
        place = len(self.accepted)
        return bits(self.choices[place]) if place < len(self.choices) else b""

    def accept(self, token: int) -> None:
        assert token in self.choices[len(self.accepted)]
        self.accepted.append(token)


def tokens_of(completion: Completion | None) -> tuple[int, ...]:
    assert completion is not None
    return completion.tokens


def run(engine: Engine) -> None:
    while engine.has_work("serving"):
        engine.step("serving")


def test_a_mask_is_read_from_the_lowest_bit_and_forbids_what_it_does_not_reach() -> None:
    logits_BV = mx.zeros((2, 19))
    found = np.isfinite(np.array(masked(logits_BV, [bytes([0b10000001, 0b10]), None])))
    assert np.flatnonzero(found[0]).tolist() == [0, 7, 9]
    assert found[1].all()


def test_masked_tokens_have_the_log_probs_of_the_policy_itself() -> None:
    logits = np.random.default_rng(0).normal(size=(1, VOCABULARY_SIZE)).astype(np.float32)
    for temperature in (0.0, 0.7):
        params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9)
        drawn = sample(mx.array(logits), row_sampling([params], [3]), [0], masked(mx.array(logits), [bits([4, 9])]))
        scaled = logits[0].astype(np.float64) / (temperature or 1.0)
        token = drawn.tokens_B.item()
        assert token in (4, 9)
        assert drawn.read()[1].item() == pytest.approx(scaled[token] - np.log(np.exp(scaled).sum()), abs=1e-5)


@pytest.mark.parametrize("max_rows", [2, 128])
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_rows_keep_to_their_grammar_and_their_neighbours_are_as_they_were_without(
    architecture: str,
    max_rows: int,
    load_tiny: Callable[..., SharedModel],
    ask: Ask,
    make_engine: Callable[..., Engine],
) -> None:
    model = load_tiny(architecture)
    choices = tuple((3 + place, 100 + place, 200 + place) for place in range(12))
    free = [ask(f"free{i}", PROMPT[i:], 4 + 3 * i, temperature=1.0, seed=i) for i in range(3)]
    bound = [
        ask("greedy", PROMPT, 20, grammar=OneOfEach(choices[:5])),
        ask("sampled", PROMPT, 7, temperature=1.0, seed=4, n=3, grammar=OneOfEach(choices)),
    ]

    def play(requests: Sequence[GenerationRequest], async_scheduling: bool) -> dict[tuple[str, int], Completion]:
        events: list[TokenEvent] = []
        engine = make_engine(
            model, events=events, settings=EngineSettings(max_rows=max_rows), async_scheduling=async_scheduling
        )
        for request in requests:
            engine.add(request, False)
        run(engine)
        assert (engine.num_running(), engine.num_waiting()) == (0, 0)
        return {(event.request_id, event.index): event.completion for event in events if event.completion}

    mixed = [free[0], bound[0], free[1], bound[1], free[2]]
    ahead, behind, alone = play(mixed, True), play(mixed, False), play(free, False)
    assert ahead.keys() == behind.keys()
    for row, completion in ahead.items():
        assert completion.tokens == behind[row].tokens
    for row, completion in alone.items():
        assert completion.tokens == ahead[row].tokens
    assert (len(ahead["greedy", 0].tokens), ahead["greedy", 0].finish_reason) == (5, "stop")
    for index in range(3):
        made = ahead["sampled", index]
        assert (len(made.tokens), made.finish_reason) == (7, "length")
        assert all(token in choices[place] for place, token in enumerate(made.tokens))
    assert len({ahead["sampled", index].tokens for index in range(3)}) > 1


def test_an_end_token_that_the_grammar_allows_ends_the_completion(
    load_tiny: Callable[..., SharedModel], ask: Ask, complete: Callable[..., Any]
) -> None:
    request = ask("a", PROMPT, 9, ignore_eos=False, grammar=OneOfEach(((7,), (1,), (8,))))
    (made,) = complete(load_tiny("llama"), [request])["a"]
    assert (made.tokens, made.finish_reason) == ((7, 1), "stop")


def test_a_grammar_that_allows_nothing_is_refused(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(load_tiny("llama"))
    with pytest.raises(InvalidRequest, match="allows no token"):
        engine.add(ask("a", PROMPT, grammar=OneOfEach(((),))), False)
    assert engine.num_waiting() == 0


def test_the_forward_of_a_masked_step_is_launched_before_the_step_before_is_read(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(load_tiny("llama"), async_scheduling=True)
    engine.add(ask("a", PROMPT, 3, grammar=OneOfEach(((7, 8), (9, 10), (11, 12)))), False)
    engine.step("serving")
    order: list[str] = []
    launch, wait = mx.async_eval, mx.eval

    def launched(arrays: list[list[mx.array]]) -> None:
        order.extend("forward" if array.shape[-1] == VOCABULARY_SIZE else "sample" for (array,) in arrays)
        launch(arrays)

    def read(arrays: list[list[mx.array]]) -> None:
        order.append("read" if isinstance(arrays[0][0], mx.array) and arrays[0][0].ndim == 2 else "prompt")
        wait(arrays)

    monkeypatch.setattr(mx, "async_eval", launched)
    monkeypatch.setattr(mx, "eval", read)
    run(engine)
    assert order == ["forward", "prompt", "sample", "forward", "read", "sample", "forward", "read", "sample", "read"]


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_abort_disturbs_no_masked_neighbour(
    when: int, load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    choices = tuple((3 + place, 100 + place) for place in range(8))
    kept = ask("kept", PROMPT, 8, temperature=1.0, seed=1, n=2, grammar=OneOfEach(choices))
    told: list[list[tuple[int, ...]]] = []
    for aborts in (True, False):
        events: list[TokenEvent] = []
        engine = make_engine(load_tiny("llama"), events=events, async_scheduling=True)
        engine.add(replace(kept, request_id="gone"), False)
        engine.add(kept, False)
        for unit in range(40):
            if aborts and unit == when:
                engine.abort("gone")
            if engine.has_work("serving"):
                engine.step("serving")
        told.append([tokens_of(event.completion) for event in events if event.request_id == "kept"])
    assert told[0] == told[1]
    assert len(told[0]) == 2


def test_the_embedded_model_ends_a_small_object_long_before_sixty_tokens(
    nano: SharedModel, complete: Callable[..., dict[str, list[Completion]]]
) -> None:
    number = {"n": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": number, "required": ["n"], "additionalProperties": False})
    source = GrammarSource(form="json", text=schema, parameter="response_format")
    prompt = nano.tokenizer.encode_prompt([{"role": "user", "content": "Tom has 12 apples. How many has he?"}])
    sampled = [
        GenerationRequest(
            request_id=str(temperature),
            prompt_tokens=prompt.tokens,
            sampling=SamplingParams(
                max_tokens=60, temperature=temperature, grammar=nano.tokenizer.compile_grammar(source), seed=7
            ),
            model="base",
            n=4,
        )
        for temperature in (0.0, 1.0)
    ]
    made = [one for group in complete(nano, sampled).values() for one in group]
    assert all(one.finish_reason == "stop" and isinstance(json.loads(one.text)["n"], int) for one in made)
    assert max(len(one.tokens) for one in made) < 30
