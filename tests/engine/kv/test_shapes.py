"""Prompts in few sizes, as with MLX's CUDA build, give what they give at their own lengths."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from parallm.engine.engine import Engine
from parallm.engine.kv import shapes
from parallm.engine.prefill import Prefill
from parallm.engine.settings import EngineSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent
from tests.engine.conftest import by_request, step

LENGTHS = [3, 300, 129, 128, 700, 1500, 300, 640]


def on_cuda() -> bool:
    return True


def requests_of(ask: Callable[..., GenerationRequest]) -> list[GenerationRequest]:
    """Some begin alike; the second 300 tokens go on from 256 that are known."""
    return [
        ask(f"r{place}", [5 + (length * step) % 83 for step in range(length)], 4, n=1 + place % 2, seed=place)
        for place, length in enumerate(LENGTHS)
    ]


def run(
    make_engine: Callable[..., Engine], model: SharedModel, requests: Sequence[GenerationRequest], together: int
) -> tuple[dict[str, list[Completion]], set[tuple[int, ...]], Engine]:
    """Completions, the shapes of what was computed for prompts, and the engine."""
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, settings=EngineSettings(prefill_chunk=512))
    assert isinstance(engine.prefill, Prefill)
    engine.prefill.max_positions = together
    computed: set[tuple[int, ...]] = set()
    hidden = SharedModel.hidden

    def noted(self: SharedModel, tokens_BT: mx.array, cache: object, lora: object) -> mx.array:
        if tokens_BT.shape[1] > 1:
            computed.add(tuple(tokens_BT.shape))
        return hidden(self, tokens_BT, cache, lora)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedModel, "hidden", noted)
        for request in requests:
            engine.add(request, False)
            step(engine)
        while step(engine):
            pass
    return by_request(requests, events), computed, engine


@pytest.mark.cpu
@pytest.mark.parametrize("together", [0, 512])
def test_prompts_in_few_sizes_give_the_same(
    make_engine: Callable[..., Engine],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
    together: int,
) -> None:
    model, requests = load_tiny("llama"), requests_of(ask)
    expected, ragged, _ = run(make_engine, model, requests, 0)
    monkeypatch.setattr(shapes, "on_cuda", on_cuda)
    found, computed, engine = run(make_engine, model, requests, together)
    assert all(length % 128 for _, length in ragged if length not in (128, 512))
    assert {length for _, length in computed} <= {128, 256, 384, 512}
    assert engine.prefill.num_cached_tokens == 256
    for name, completions in expected.items():
        for one, other in zip(completions, found[name], strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


@pytest.mark.cpu
def test_sizes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [shapes.padded(count) for count in (1, 4, 130)] == [4, 4, 130]
    assert [shapes.allocated(count) for count in (1, 130)] == [5, 134]
    assert shapes.reusable(48) == 48
    monkeypatch.setattr(shapes, "on_cuda", on_cuda)
    assert [shapes.padded(count) for count in (1, 128, 129, 1024, 1025, 2049)] == [
        128,
        128,
        256,
        1024,
        1280,
        2560,
    ]
    assert all(shapes.padded(count) <= shapes.allocated(count) for count in range(1, 5000))
    assert len({shapes.allocated(count) for count in range(1, 8193)}) == 20
    assert [shapes.reusable(count) for count in (112, 128, 300)] == [0, 128, 256]
