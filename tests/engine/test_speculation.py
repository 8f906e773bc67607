"""Speculation changes how many tokens a step brings, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine import speculation
from parallm.engine.engine import TRAFFIC_CLASSES, Engine
from parallm.engine.sequence import Sequence as Row
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.engine.speculation import AcceptanceRates, Draft, NgramLookup
from parallm.errors import ConfigError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

LoadTiny = Callable[..., SharedModel]
Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]
Complete = Callable[..., dict[str, list[Completion]]]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
PROMPT = (5, 300, 17, 9, 44, 2, 8)
PLAIN = EngineSettings(speculation=SpeculationSettings(method="none"))
SPECULATING = EngineSettings(speculation=SpeculationSettings(method="ngram"))


def repeating(place: int, length: int) -> tuple[int, ...]:
    """A prompt that repeats itself every few tokens."""
    return tuple(5 + (place * 31 + i % (3 + place % 4)) % 300 for i in range(length))


def varied_requests(ask: Ask) -> list[GenerationRequest]:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12, "min_p": 0.01, "n": 3},
        {"top_logprobs": 3, "logit_bias": ((7, 4.0), (8, -5.0))},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "ignore_eos": False, "min_tokens": 6},
        {"temperature": 0.5, "stop_token_ids": tuple(range(2, 40)), "ignore_eos": False},
    ]
    requests = [ask(f"r{i}", repeating(i, 7 + 5 * i), 40 + i, seed=i, **kind) for i, kind in enumerate(kinds)]
    return [replace(one, traffic=TRAFFIC_CLASSES[place % 3 == 0]) for place, one in enumerate(requests)]


@needs_strict
@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "gemma3_text",
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt2", "olmo2", "gpt_neox")),
    ],
)
def test_completions_are_those_without_speculation_to_the_bit(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model, requests = load_tiny(architecture), varied_requests(ask)
    found = complete(model, requests, settings=SPECULATING, apart=3)
    assert found == complete(model, requests, settings=PLAIN, apart=3)
    assert sum(one.num_accepted_tokens for made in found.values() for one in made) > 0


def foresee(monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Sequence[Completion]], wrong_by: int = 0) -> None:
    """Propose what a run before has sampled, or tokens that it has not."""

    def propose(lookup: NgramLookup, row: Row, completion: Sequence[int], most: int) -> Draft | None:
        truth = known[row.request.request_id][row.index].tokens[len(completion) :][:most]
        return Draft([(token + wrong_by) % 385 for token in truth], 4, len(completion)) if truth else None

    monkeypatch.setattr(NgramLookup, "propose", propose)


def test_a_perfect_draft_is_accepted_whole(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, request = load_tiny("llama"), ask("r", PROMPT, 1 + 6 * 7, temperature=1.0, seed=3)
    known = complete(model, [request], settings=PLAIN)
    foresee(monkeypatch, known)
    monkeypatch.setattr(speculation, "PRIOR", (1.0,) * 4)  # as after many that were right
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, settings=SPECULATING)
    engine.add(request, True)
    while engine.has_work("serving"):
        engine.step("serving")
    # the first comes from the prompt; then 5 drafts and the token behind them
    assert [len(event.tokens) for event in events] == [1, 6, 6, 6, 6, 6, 6, 6]
    assert (engine.speculation.num_drafts, engine.speculation.num_drafted, engine.speculation.num_accepted) == (
        7,
        35,
        35,
    )
    made = events[-1].completion
    assert made is not None
    assert (made.tokens, made.num_draft_tokens, made.num_accepted_tokens) == (known["r"][0].tokens, 35, 35)
    assert "".join(event.text for event in events) == made.text
    assert engine.num_tokens()["serving"] == 43


@needs_strict
def test_wrong_drafts_change_nothing_and_end_soon(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama")
    requests = [ask(f"r{i}", repeating(i, 20 + i), 300, temperature=0.5 * i, seed=i) for i in range(3)]
    known = complete(model, requests, settings=PLAIN)
    foresee(monkeypatch, known, wrong_by=1)
    found = complete(model, requests, settings=SPECULATING)
    assert found == known
    assert all(made.num_accepted_tokens == 0 for (made,) in found.values())
    assert all(0 < made.num_draft_tokens < 3 * 60 for (made,) in found.values())


@needs_strict
def test_what_ends_a_completion_ends_it_amid_accepted_tokens(
    load_tiny: LoadTiny, ask: Ask, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, request = load_tiny("llama"), ask("r", PROMPT, 40, temperature=1.0, seed=8)
    whole = complete(model, [request], settings=PLAIN)
    tokens, texts = whole["r"][0].tokens, map(model.tokenizer.token_text, whole["r"][0].tokens[8:10])
    endings = [
        (9, replace(request.sampling, stop_token_ids=(tokens[8],))),
        (10, replace(request.sampling, stop=("".join(texts),))),
        (9, replace(request.sampling, max_tokens=9)),
    ]
    for length, sampling in endings:
        ended = replace(request, sampling=sampling)
        with monkeypatch.context() as patch:
            foresee(patch, whole)
            found = complete(model, [ended], settings=SPECULATING)
        assert found == complete(model, [ended], settings=PLAIN)
        assert found["r"][0].tokens == tokens[:length]
        assert found["r"][0].num_accepted_tokens >= 6


@needs_strict
def test_rows_of_several_versions_speculate_together(
    load_tiny: LoadTiny, ask: Ask, complete: Complete, random_adapter: Callable[..., Adapter]
) -> None:
    model, table = load_tiny("llama"), AdapterTable()
    for version in (1, 2):
        table.publish(random_adapter(model, version))
    models = ("base", "policy@1", "policy@2", "policy@1")
    requests = [ask(f"r{i}", repeating(i, 20), 40, model=one, temperature=0.3, seed=i) for i, one in enumerate(models)]
    found = complete(model, requests, table=table, settings=SPECULATING)
    assert found == complete(model, requests, table=table, settings=PLAIN)
    assert sum(made.num_accepted_tokens for (made,) in found.values()) > 0


@needs_strict
@pytest.mark.parametrize(("num_bytes", "async_scheduling"), [(300_000, False), (None, True), (300_000, True)])
def test_rows_that_are_preempted_or_run_ahead_get_the_same(
    num_bytes: int | None,
    async_scheduling: bool,
    load_tiny: LoadTiny,
    ask: Ask,
    make_engine: MakeEngine,
    complete: Complete,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events = load_tiny("llama"), list[TokenEvent]()
    requests = [ask(f"r{i}", repeating(i, 30 + i), 60, temperature=0.3, seed=i) for i in range(6)]
    known = complete(model, requests, settings=PLAIN)
    foresee(monkeypatch, known)
    settings = replace(SPECULATING, kv_cache_bytes=num_bytes)
    engine = make_engine(model, events=events, settings=settings, async_scheduling=async_scheduling)
    for request in requests:
        engine.add(request, True)
    while engine.has_work("serving"):
        engine.step("serving")
    assert {event.request_id: [event.completion] for event in events if event.completion} == known
    assert sum(len(event.tokens) for event in events) == engine.num_tokens()["serving"] == 360
    assert (engine.scheduler.num_preempted > 0) is (num_bytes is not None)
    assert engine.speculation.num_accepted > 100


def test_grammars_and_penalties_are_sampled_token_by_token(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    model = load_tiny("llama")
    plain, penalised = ask("a", repeating(0, 30), 30), ask("b", repeating(0, 30), 30, presence_penalty=0.1)
    found = complete(model, [plain, penalised], settings=SPECULATING)
    assert found["a"][0].num_draft_tokens > 0
    assert found["b"][0].num_draft_tokens == 0


def test_rows_that_cannot_be_taken_back_do_not_speculate(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, complete: Complete
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.speculation\.method=ngram.*keep states; use auto or none"):
        make_engine(load_tiny("mamba"), settings=SPECULATING)
    ((made,),) = complete(load_tiny("mamba"), [ask("r", repeating(0, 20), 20)]).values()
    assert (len(made.tokens), made.num_draft_tokens) == (20, 0)


def test_lookup_proposes_what_followed_the_longest_match_last() -> None:
    lookup = NgramLookup((1, 2, 3, 9, 1, 2, 4, 7, 3))
    assert lookup.propose("a", (5, 1, 2), 3) == Draft([4, 7, 3], 2)
    assert lookup.propose("a", (5, 1, 2, 3), 2) == Draft([9, 1], 3)
    assert lookup.propose("b", (8,), 4) is None
    assert lookup.propose("b", (8, 5), 4) == Draft([1, 2, 3], 1)  # what the other row has sampled
    assert lookup.propose("b", (8, 5, 2, 3), 1) == Draft([9], 2)


def test_rates_follow_what_was_right() -> None:
    rates, draft = AcceptanceRates(), Draft([1, 2, 3], 2)
    before = rates.survivals(draft)
    assert before == pytest.approx([0.3, 0.3 * 0.4, 0.3 * 0.4 * 0.5])
    assert rates.learn(draft, [1, 2, 9, 9]) == 2
    after = rates.survivals(draft)
    assert after[0] == pytest.approx((0.97 * 1.2 + 1) / (0.97 * 4 + 1))
    assert after[1] > after[0] * 0.4
    assert after[2] < after[1] * 0.5
