"""Keys and values of rows in 8 bits: what they take, how far log-probs are from those of full ones, what is refused."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.engine import Engine
from parallm.engine.kv.cost import KvFormat
from parallm.engine.settings import EngineSettings
from parallm.errors import ConfigError
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]
EIGHT = EngineSettings(kv_bits=8)


def asked(ask: Ask) -> list[GenerationRequest]:
    random = np.random.default_rng(2)
    return [
        ask(f"r{row}", [int(token) for token in random.integers(2, 375, 5 + 13 * row)], 4 + 5 * row, n=1 + row % 2)
        for row in range(6)
    ]


@pytest.mark.parametrize("size", [16, 64, 96, 128])
def test_numbers_come_back_within_half_a_step(size: int) -> None:
    keys, values = mx.random.normal((3, 2, 5, size)), mx.random.normal((3, 2, 5, size))
    packing = KvFormat(8)
    for array, found in zip((keys, values), packing.unpack(packing.pack(keys, values)), strict=True):
        assert found.shape == array.shape
        assert mx.abs(found - array).max().item() <= 0.51 * (array.max() - array.min()).item() / 255


def test_a_row_takes_less_than_a_third_of_float32(nano: SharedModel, make_engine: Callable[..., Engine]) -> None:
    plain, packed = (
        make_engine(nano, settings=settings).memory.batch().bytes_for([100], end=None)
        for settings in (EngineSettings(), EIGHT)
    )
    assert packed / plain == pytest.approx((8 + 2 * 32 / 32) / 32)


def test_log_probs_with_8_bits_are_close_to_those_without(nano: SharedModel, ask: Ask, complete: Complete) -> None:
    full, packed = complete(nano, asked(ask)), complete(nano, asked(ask), settings=EIGHT)
    pairs = [(one, other) for name in full for one, other in zip(full[name], packed[name], strict=True)]
    alike = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    assert len(alike) >= len(pairs) - 1, "greedy tokens"
    gaps = np.abs(np.concatenate([np.array(one.logprobs) - np.array(other.logprobs) for one, other in alike]))
    assert 0 < gaps.mean() <= 0.01
    assert gaps.max() <= 0.1


def test_a_row_gets_the_same_tokens_in_any_company_and_place(nano: SharedModel, ask: Ask, complete: Complete) -> None:
    requests = asked(ask)
    together = complete(nano, requests, settings=EIGHT, apart=2)
    for request in requests[2:5]:
        (alone,) = complete(nano, [request], settings=EIGHT).values()
        for one, other in zip(alone, together[request.request_id], strict=True):
            assert one.tokens == other.tokens
            assert np.abs(np.array(one.logprobs) - np.array(other.logprobs)).max() <= 1e-4


def test_preempted_rows_and_known_beginnings_go_on(
    nano: SharedModel, ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    events: list[object] = []
    per_token = make_engine(nano).memory.cost.per_token
    engine = make_engine(nano, events=events, settings=EngineSettings(kv_bits=8, kv_cache_bytes=245 * per_token))
    for request in asked(ask):
        engine.add(replace(request, n=4), False)
    while engine.has_work("serving"):
        engine.step("serving")
    assert engine.scheduler.num_preempted >= 1
    assert len(events) == 24


def test_models_that_run_row_by_row_say_so(
    load_tiny: Callable[..., SharedModel], make_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_bits is 8, and .* set it to null"):
        make_engine(load_tiny("mamba"), settings=EIGHT)


def test_mlx_with_cuda_says_so(
    nano: SharedModel, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.engine.kv.cost.on_cuda", lambda: True)
    with pytest.raises(ConfigError, match=r"engine\.kv_bits is 8, and with MLX's CUDA build"):
        make_engine(nano, settings=EIGHT)
