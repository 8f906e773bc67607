"""Prompts that one forward computes together give what they give alone."""

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.prefill import Prefill
from parallm.engine.sequence import PrefillJob
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent
from tests.engine.conftest import by_request, step

BEGINNING = [3 + place % 50 for place in range(40)]


def run(
    make_engine: Callable[..., Engine],
    model: SharedModel,
    requests: Sequence[GenerationRequest],
    together: int,
    ahead: int = 0,
    num_streams: int = 1,
    **more: object,
) -> tuple[dict[str, list[Completion]], list[list[int]], Engine]:
    """The completions, and the lengths of prompts that were computed together, on so many streams; the others come a
    step after the first `ahead` requests."""
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, **more)
    assert isinstance(engine.prefill, Prefill)
    engine.prefill.max_positions = together
    engine.prefill._streams = copy.copy(engine.prefill._streams)
    engine.prefill._streams.handles = engine.prefill._streams.handles[:num_streams]
    counts: list[list[int]] = []
    compute = engine.prefill.compute_together

    def count(prompts: Sequence[PrefillJob]) -> list[mx.array]:
        counts.append([len(one.tokens) for one in prompts])
        return compute(prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.prefill, "compute_together", count)
        for request in requests[:ahead]:
            engine.add(request, False)
        step(engine)
        for request in requests[ahead:]:
            engine.add(request, False)
        while step(engine):
            pass
    return by_request(requests, events), counts, engine


def same(alone: dict[str, list[Completion]], together: dict[str, list[Completion]]) -> bool:
    return all(
        one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        for name in alone
        for one, other in zip(alone[name], together[name], strict=True)
    )


def test_each_stream_has_a_forward_of_prompts(
    make_engine: Callable[..., Engine],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    streams: DeviceStreams,
) -> None:
    requests = [ask(f"r{place}", [5 + place] * 20, 2, model="base") for place in range(2 * streams.width)]
    _, counts, _ = run(make_engine, load_tiny("qwen3_5"), requests, 512, num_streams=streams.width)
    assert counts == [[20, 20]] * streams.width


@pytest.mark.cpu
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2", "qwen3_5", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompts_of_similar_length_give_the_same_together_as_alone(
    make_engine: Callable[..., Engine],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    model_type: str,
    async_scheduling: bool,
) -> None:
    model = load_tiny(model_type)
    lengths = [20, 31, 3, 28, 17, 300, 30, 40, 2]
    requests = [
        ask(
            f"r{place}", [5 + place + step % 70 for step in range(length)], 6, n=1 + place % 3, model="base", seed=place
        )
        for place, length in enumerate(lengths)
    ]
    alone, none, _ = run(make_engine, model, requests, 0, async_scheduling=async_scheduling)
    together, counts, _ = run(make_engine, model, requests, 128, async_scheduling=async_scheduling)
    assert (none, counts) == ([], [[20, 31, 28, 17], [3, 2], [30], [40]])
    assert same(alone, together)


@pytest.mark.cpu
def test_prompts_go_on_together_from_beginnings_of_one_length(
    make_engine: Callable[..., Engine], load_tiny: Callable[..., SharedModel], ask: Callable[..., GenerationRequest]
) -> None:
    model = load_tiny("llama")
    requests = [ask("first", [*BEGINNING, 7, 8], 3, model="base")]
    requests += [
        ask(f"r{place}", [*BEGINNING, 9 + place, *range(10, 20 + place)], 5, model="base") for place in range(4)
    ]
    requests += [ask("other", [*range(60, 75)], 5, model="base")]
    alone, _, first = run(make_engine, model, requests, 0)
    together, counts, second = run(make_engine, model, requests, 128, ahead=1)
    assert counts == [[42], [51, 52, 53, 54], [15]], "what the first leaves is known to four others"
    assert first.prefill.num_cached_tokens == second.prefill.num_cached_tokens == 4 * 32
    assert [one[0].num_cached_prompt_tokens for one in together.values()] == [0, 32, 32, 32, 32, 0]
    assert same(alone, together)


@pytest.mark.cpu
def test_only_prompts_of_one_version_are_computed_together(
    make_engine: Callable[..., Engine],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
) -> None:
    model, table = load_tiny("llama"), AdapterTable()
    table.publish(random_adapter(model, 1))
    requests = [
        ask(f"r{place}", [5 + place, *range(8, 20)], 5, model=("policy", "base")[place % 2]) for place in range(4)
    ]
    alone, _, _ = run(make_engine, model, requests, 0, table=table)
    together, counts, _ = run(make_engine, model, requests, 128, table=table)
    assert counts == [[13, 13], [13, 13]]
    assert same(alone, together)
