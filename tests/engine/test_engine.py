from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine import decode_batch
from parallm.engine.engine import TRAFFIC_CLASSES, Engine
from parallm.engine.prefill import Prefill
from parallm.engine.sequence import PrefillJob
from parallm.engine.settings import EngineSettings
from parallm.errors import EngineFull, UnknownModel
from parallm.model.logprobs import token_logprobs
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]
LoadTiny = Callable[..., SharedModel]
MakeEngine = Callable[..., Engine]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
PROMPT = (5, 300, 17, 9, 44, 2, 8)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def run(engine: Engine) -> None:
    while any(engine.has_work(traffic) for traffic in TRAFFIC_CLASSES):
        for traffic in TRAFFIC_CLASSES:
            if engine.has_work(traffic):
                engine.step(traffic)


def completions(events: Sequence[TokenEvent]) -> dict[tuple[str, int], Completion]:
    return {(event.request_id, event.index): event.completion for event in events if event.completion is not None}


@needs_strict
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral", "mamba"])
def test_a_seed_gives_the_same_tokens_and_log_probabilities_in_any_company(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model = load_tiny(architecture)
    one = ask("one", prompt(1, 9), 12, temperature=1.0, seed=77, n=3)
    others = [ask(f"o{i}", prompt(i, 4 + i % 23), 4 + i % 13, temperature=1.0, seed=i) for i in range(40)]
    alone = complete(model, [one])["one"]
    assert len({completion.tokens for completion in alone}) == 3
    for order in ([one, *others], [*others[:25], one, *others[25:]], [*reversed(others), one]):
        assert complete(model, order, apart=1)["one"] == alone


def test_requests_without_a_seed_differ(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    made = complete(load_tiny("llama"), [ask(name, PROMPT, 12, temperature=1.0) for name in "ab"])
    assert made["a"][0].tokens != made["b"][0].tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "gpt_bigcode", "jamba"])
def test_log_probabilities_are_the_log_softmax_of_the_full_forward(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model = load_tiny(architecture)
    made = complete(model, [ask("r", PROMPT, 20, temperature=0.7, seed=3)])["r"][0]
    logits = model.base(mx.array([PROMPT + made.tokens[:-1]]))[0, len(PROMPT) - 1 :]
    logprobs = np.array(logits, np.float64) / 0.7
    logprobs -= np.log(np.exp(logprobs).sum(axis=-1, keepdims=True))
    chosen = logprobs[np.arange(20), made.tokens]
    assert np.abs(chosen - np.array(made.logprobs)).max() < 1e-4


@needs_strict
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "granite", "gpt2"])
def test_decoding_gives_the_bits_of_the_full_forward(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model = load_tiny(architecture)
    requests = [ask(f"r{i}", prompt(i, 4 + 30 * i), 20, temperature=0.7, seed=i) for i in range(7)]
    made = complete(model, requests, apart=2, settings=EngineSettings(prefill_chunk=64))
    for request in requests:
        completion = made[request.request_id][0]
        tokens = mx.array([request.prompt_tokens + completion.tokens[:-1]])
        hidden = model.hidden(tokens, model.make_cache(), None)[0, len(request.prompt_tokens) - 1 :]
        logprobs = token_logprobs(model.head(hidden), mx.full((20,), 0.7), mx.array(completion.tokens))
        assert tuple(logprobs.tolist()) == completion.logprobs


@needs_strict
@pytest.mark.parametrize("length", [16, 17, 19, 20, 31, 33, 50, 200])
def test_a_prompt_in_chunks_gives_the_bits_of_a_whole_one(
    length: int, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model = load_tiny("gemma3_text")
    request = ask("r", prompt(4, length), 10, temperature=0.7, seed=5)
    whole = complete(model, [request])["r"]
    assert complete(model, [request], settings=EngineSettings(prefill_chunk=16))["r"] == whole


@pytest.mark.parametrize("architecture", ["mamba", "jamba", "gemma2", "gpt_bigcode"])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_whole_one_row_by_row(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model = load_tiny(architecture)
    request = ask("r", prompt(4, 50), 10)
    whole, parts = (complete(model, [request], settings=EngineSettings(prefill_chunk=c))["r"][0] for c in (512, 16))
    assert whole.tokens == parts.tokens
    assert np.abs(np.array(whole.logprobs) - np.array(parts.logprobs)).max() < 1e-4


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_all_completions_of_a_request_share_one_pass_over_the_prompt(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden, passes = load_tiny(architecture), SharedModel.hidden, []

    def counted(self: SharedModel, tokens_BT: mx.array, *rest: Any) -> mx.array:
        passes.append(tokens_BT.shape)
        return hidden(self, tokens_BT, *rest)

    monkeypatch.setattr(SharedModel, "hidden", counted)
    monkeypatch.setattr(decode_batch, "shares_steps", lambda _: True)  # without its trial, nor that of padding
    monkeypatch.setattr("parallm.engine.prefill.pads_prompts", lambda _: False)
    made = complete(model, [ask("r", PROMPT, 5, n=6, temperature=1.0, seed=1)])["r"]
    assert [shape for shape in passes if shape[1] > 1] == [(1, 7)]
    assert [completion.index for completion in made] == [0, 1, 2, 3, 4, 5]


@pytest.mark.cpu
def test_more_completions_than_rows_wait_for_a_row(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    model = load_tiny("llama")
    requests = [ask("a", PROMPT, 5, n=7, seed=1, temperature=1.0), ask("b", prompt(2, 9), 4, n=3, seed=2)]
    few = complete(model, requests, settings=EngineSettings(max_rows=3))
    assert few == complete(model, requests)


def test_a_prompt_without_a_row_is_computed_where_a_lane_had_nothing_to_do(
    load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, compute = list[list[str]](), Prefill.compute

    def noted(self: Prefill, prompts: Sequence[PrefillJob]) -> list[list[mx.array]]:
        units.append([prompt.request.request_id for prompt in prompts])
        return compute(self, prompts)

    monkeypatch.setattr(Prefill, "compute", noted)
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(max_rows=1))
    monkeypatch.setattr(engine._streams, "handles", engine._streams.handles[:1] * 2)
    for name in "abc":
        engine.add(ask(name, PROMPT, 5), False)
    engine.step("serving")
    assert (units, engine.num_running()) == ([["a", "b"]], 0)
    run(engine)
    assert units == [["a", "b"], ["c"]]


@pytest.mark.cpu
def test_greedy_rows_and_sampled_rows_share_a_batch(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    model = load_tiny("llama")
    greedy, sampled = ask("g", PROMPT, 9), ask("s", PROMPT, 9, temperature=1.0, seed=4, top_p=0.9)
    together = complete(model, [greedy, sampled])
    assert together == complete(model, [greedy]) | complete(model, [sampled])
    assert together["g"][0].tokens != together["s"][0].tokens


def test_ends_of_all_kinds(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    model = load_tiny("llama")
    free = complete(model, [ask("free", PROMPT, 12)])["free"][0]
    assert (len(free.tokens), free.finish_reason) == (12, "length")
    third = free.tokens[2]
    stopped = complete(model, [ask("r", PROMPT, 12, stop_token_ids=(third,))])["r"][0]
    assert stopped.tokens == free.tokens[: free.tokens.index(third) + 1]
    assert stopped.finish_reason == "stop"
    text = model.tokenizer.decode(free.tokens)
    cut = complete(model, [ask("r", PROMPT, 12, stop=(text[3:6],))])["r"][0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(text[3:6])], "stop")


def test_alternatives_come_with_each_token(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    asked, plain = ask("a", PROMPT, 6, top_logprobs=4), ask("b", prompt(1, 5), 6)
    made = complete(load_tiny("llama"), [asked, plain])
    assert [len(tops) for tops in made["a"][0].top_logprobs] == [4] * 6
    one = made["a"][0]
    for token, logprob, tops in zip(one.tokens, one.logprobs, one.top_logprobs, strict=True):
        assert tops[0].token == token
        assert tops[0].logprob == pytest.approx(logprob, abs=1e-5)
        assert [top.logprob for top in tops] == sorted((top.logprob for top in tops), reverse=True)
    assert made["b"][0].top_logprobs == ((),) * 6


def test_completions_say_that_the_base_made_them(load_tiny: LoadTiny, ask: Ask, complete: Complete) -> None:
    spans = complete(load_tiny("llama"), [ask("r", PROMPT, 6)])["r"][0].weight_versions
    assert [(span.version, span.start, span.end) for span in spans] == [(0, 0, 6)]


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_an_aborted_request_frees_its_rows_and_disturbs_nobody(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete, make_engine: MakeEngine
) -> None:
    model, events = load_tiny(architecture), list[TokenEvent]()
    kept = [ask(f"k{i}", prompt(i, 5 + i), 12, temperature=1.0, seed=i) for i in range(5)]
    engine = make_engine(model, events=events, settings=EngineSettings(max_rows=6))
    for request in (kept[0], ask("gone", PROMPT, 50, n=4), *kept[1:], ask("late", PROMPT, 50)):
        engine.add(request, False)
    for _ in range(8):
        engine.step("serving")
    assert engine.num_running() == 6
    engine.abort("gone")
    engine.abort("late")
    engine.abort("unknown")
    assert engine.num_running() == 2
    run(engine)
    assert (engine.num_running(), engine.num_waiting()) == (0, 0)
    alone = {name: made[0] for request in kept for name, made in complete(model, [request]).items()}
    assert {name: completion for (name, _), completion in completions(events).items()} == alone


def test_a_request_too_many_is_refused(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(max_waiting=2))
    for name in "ab":
        engine.add(ask(name, PROMPT), False)
    with pytest.raises(EngineFull, match=r"2 requests wait already.*engine.max_waiting"):
        engine.add(ask("c", PROMPT), False)
    run(engine)
    engine.add(ask("c", PROMPT), False)


def test_an_unknown_model_is_refused(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    engine = make_engine(load_tiny("llama"))
    with pytest.raises(UnknownModel, match="policy@3"):
        engine.add(ask("a", PROMPT, model="policy@3"), False)
    assert not engine.has_work("serving")


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_a_step_waits_for_the_device_once(
    architecture: str, load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(load_tiny(architecture))
    for index in range(5):
        # with a seed: a draft that chance makes right would end a row before the others, which moves one
        engine.add(ask(f"r{index}", PROMPT, 8, temperature=1.0, top_p=0.9, seed=index, top_logprobs=2), False)
    evaluate, num_waits, num_steps = mx.eval, 0, 0

    def counted(*arrays: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    monkeypatch.setattr(mx, "async_eval", lambda *_: pytest.fail("a second evaluation"))
    while engine.has_work("serving"):
        engine.step("serving")
        num_steps += 1
    assert num_waits == num_steps >= 10


def test_a_failed_step_fails_its_class_and_the_next_request_works(
    load_tiny: LoadTiny, ask: Ask, complete: Complete, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events, failures = load_tiny("llama"), list[TokenEvent](), list[tuple[list[str], Exception]]()
    engine = make_engine(model, events=events, failures=failures)
    for name in "ab":
        engine.add(ask(name, PROMPT, 6), False)
    engine.add(rollout(ask("c", PROMPT, 6)), False)
    for _ in range(2):
        for traffic in TRAFFIC_CLASSES:
            engine.step(traffic)
    with monkeypatch.context() as patch:
        patch.setattr(SharedModel, "head", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as raised:
            engine.step("serving")
    engine.fail("serving", raised.value)
    assert [names for names, _ in failures] == [["a", "b"]]
    assert not engine.has_work("serving")
    engine.add(ask("a", PROMPT, 6), False)
    run(engine)
    expected = complete(model, [ask("a", PROMPT, 6)])["a"][0]
    assert completions(events)["a", 0] == expected
    assert completions(events)["c", 0].tokens == expected.tokens
    assert engine.num_tokens()["rollout"] == 6


def test_running_answers_take_turns_with_a_long_prompt(load_tiny: LoadTiny, ask: Ask, make_engine: MakeEngine) -> None:
    events: list[TokenEvent] = []
    engine = make_engine(load_tiny("llama"), events=events, settings=EngineSettings(prefill_chunk=16))
    engine.add(ask("short", PROMPT, 30), True)
    for _ in range(2):
        engine.step("serving")
    engine.add(ask("long", prompt(0, 160), 2), True)
    events.clear()
    for _ in range(20):
        engine.step("serving")
    assert sum(event.request_id == "short" for event in events) == 10


def rollout(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        traffic="rollout",
    )
