"""Rows that keep their slots, as with MLX's CUDA build, give what rows that move give.

The kernels are stood in for by MLX's operations on what is evaluated, and by writes behind MLX's back as theirs are.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.engine import Engine
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.shapes import BufferShape
from parallm.engine.kv.slot_manager import SlotManager
from parallm.engine.settings import EngineSettings
from parallm.model.attention import attention
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.rotary import Rotation
from parallm.model.load import load_shared_model
from parallm.model.patches.rotary import install_rotary
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import PlainCache, SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent

Ask = Callable[..., GenerationRequest]
LoadTiny = Callable[..., SharedModel]
MakeEngine = Callable[..., Engine]


def stand_in_for_attention(
    queries_BQ1D: mx.array,
    new_keys_BH1D: mx.array,
    new_values_BH1D: mx.array,
    keys_SHLD: mx.array,
    values_SHLD: mx.array,
    slots_B: mx.array,
    lengths_B: mx.array,
    *,
    scale: float,
    window: int,
    rotary: RotaryAngles | None,
) -> mx.array:
    if rotary is not None:
        queries_BQ1D, new_keys_BH1D = rotated(queries_BQ1D, rotary), rotated(new_keys_BH1D, rotary)
    slots, lengths = np.array(slots_B), np.array(lengths_B)
    for pool, new in ((keys_SHLD, new_keys_BH1D), (values_SHLD, new_values_BH1D)):
        np.array(pool, copy=False)[slots, :, lengths] = np.array(new)[:, :, 0]
    positions = mx.arange(int(lengths.max()) + 1)
    seen_BL = positions <= lengths_B[:, None]
    if window:
        seen_BL = seen_BL & (positions > lengths_B[:, None] - window)
    # as bytes of their own: MLX must not know that the pools were written
    keys, values = (mx.array(np.array(pool)[slots][:, :, : len(positions)]) for pool in (keys_SHLD, values_SHLD))
    return attention(queries_BQ1D, keys, values, scale=scale, mask=seen_BL[:, None, None])


def rotated(heads_BX1D: mx.array, rotary: RotaryAngles) -> mx.array:
    assert not rotary.traditional
    cosine, sine = (rotary.angles[:, None, None, :, part] for part in (0, 1))
    left, right = mx.split(heads_BX1D, 2, axis=-1)
    return mx.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1)


def stand_in_for_angles(rotation: Rotation, offsets_B: mx.array) -> mx.array:
    assert rotation.base is not None
    frequencies_P = rotation.base ** (-mx.arange(0, rotation.dims, 2) / rotation.dims)
    angles_BP = rotation.scale * offsets_B[:, None] * frequencies_P
    return mx.stack([mx.cos(angles_BP), mx.sin(angles_BP)], axis=-1)


def stand_in_for_copies(
    prompts_N: Sequence[mx.array],
    pools_N: Sequence[mx.array],
    *,
    rows: Sequence[int],
    slots: Sequence[int],
    lengths: Sequence[int],
) -> mx.array:
    mx.eval(*prompts_N, *pools_N)
    for prompt, pool in zip(prompts_N, pools_N, strict=True):
        for row, slot, length in zip(rows, slots, lengths, strict=True):
            np.array(pool, copy=False)[slot, :, :length] = np.array(prompt)[row, :, :length]
    return mx.zeros((1,), mx.int32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention_metadata", "cache"):
        monkeypatch.setattr(f"parallm.engine.kv.{module}.on_cuda", lambda: True)
    monkeypatch.setattr("parallm.model.patches.rotary.has_kernels", lambda: True)
    monkeypatch.setattr(Rotation, "angles", stand_in_for_angles)
    monkeypatch.setattr("parallm.engine.kv.cache.fits", lambda *_: True)
    monkeypatch.setattr("parallm.engine.kv.cache.append_and_attend", stand_in_for_attention)
    monkeypatch.setattr("parallm.engine.kv.slot_manager.can_copy", lambda *_: True)
    monkeypatch.setattr("parallm.engine.kv.slot_manager.copy_to_slots", stand_in_for_copies)


def ragged(ask: Ask) -> list[GenerationRequest]:
    random = np.random.default_rng(5)
    return [
        ask(
            f"r{place}",
            [int(token) for token in random.integers(2, 385, 3 + 11 * place % 60)],
            1 + 7 * place % 25,
            n=1 + place % 3,
            temperature=0.8,
            seed=place,
        )
        for place in range(14)
    ]


def run(
    make_engine: MakeEngine, model: SharedModel, requests: Sequence[GenerationRequest], **parts: Any
) -> tuple[Mapping[tuple[str, int], Completion], Engine]:
    """All completions of requests of which one comes with every second unit, and the engine."""
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events, **parts)
    for request in requests:
        engine.add(request, False)
        for _ in range(2):
            if engine.has_work("serving"):
                engine.step("serving")
    while engine.has_work("serving"):
        engine.step("serving")
    return {(one.request_id, one.index): one.completion for one in events if one.completion}, engine


def check(found: Mapping[tuple[str, int], Completion], expected: Mapping[tuple[str, int], Completion]) -> None:
    assert len(expected) == 27
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.tokens == expected[name].tokens
        assert np.abs(np.array(one.logprobs) - np.array(expected[name].logprobs)).max() <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "async_scheduling"),
    [
        ("llama", True),
        ("gemma3_text", False),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("gemma3_text", True, marks=pytest.mark.slow),
    ],
)
def test_rows_that_keep_their_slots_get_the_same_tokens(
    architecture: str,
    async_scheduling: bool,
    tiny_model: Callable[[str], Path],
    ask: Ask,
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: dict[str, Any] = {"settings": EngineSettings(max_rows=6)}
    model = load_shared_model(ModelSettings(path=str(tiny_model(architecture))))  # one of its own: it is changed
    requests = ragged(ask)
    expected, _ = run(make_engine, model, requests, **parts)
    request.getfixturevalue("kernels")
    install_rotary(model.base)
    rotations: list[Rotation] = []
    rotary_of = AttentionMetadata.rotary

    def noted(rows: AttentionMetadata, rotation: Rotation) -> RotaryAngles:
        rotations.append(rotation)
        return rotary_of(rows, rotation)

    monkeypatch.setattr(AttentionMetadata, "rotary", noted)
    monkeypatch.setattr(SlotCache, "put", lambda *_: pytest.fail("a row was moved"))
    monkeypatch.setattr(SlotCache, "join", lambda *_: pytest.fail("pools were written by MLX"))
    found, _ = run(make_engine, model, requests, async_scheduling=async_scheduling, **parts)
    check(found, expected)
    assert len(set(rotations)) == 1, "layers that do the same share it"


@pytest.mark.cpu
@pytest.mark.parametrize(  # some let the rows of only one stream join at once
    ("num_positions", "preempted"),
    [
        (400, 3),
        (450, 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((440, 5), (460, 5), (480, 3), (490, 3))),
    ],
)
def test_rows_that_keep_their_slots_get_the_same_tokens_where_memory_is_short(
    num_positions: int,
    preempted: int,
    load_tiny: LoadTiny,
    ask: Ask,
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
) -> None:
    model, requests = load_tiny("llama"), ragged(ask)
    expected, _ = run(make_engine, model, requests)
    request.getfixturevalue("kernels")
    one_token = make_engine(model).kv_budget.cost.per_token
    settings = EngineSettings(kv_cache_bytes=num_positions * one_token, prefix_cache=False)
    found, engine = run(make_engine, model, requests, settings=settings, async_scheduling=True)
    check(found, expected)
    assert engine.scheduler.num_preempted >= preempted


def test_a_model_that_the_kernel_does_not_know_has_its_rows_side_by_side(
    load_tiny: LoadTiny,
    ask: Ask,
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, requests = load_tiny("llama"), ragged(ask)
    expected, _ = run(make_engine, model, requests)
    request.getfixturevalue("kernels")
    monkeypatch.setattr("parallm.engine.kv.cache.fits", lambda *_: False)
    gathered: list[SlotManager] = []
    begin_step = SlotManager.begin_step

    def noted(self: SlotManager, *numbers: Sequence[int]) -> None:
        begin_step(self, *numbers)
        if not self.metadata.is_contiguous:
            gathered.append(self)

    monkeypatch.setattr(SlotManager, "begin_step", noted)
    found, _ = run(make_engine, model, requests, async_scheduling=True)
    check(found, expected)
    assert len(gathered) == len(set(gathered)) >= 1, "the first step finds out"


def free_slots(load_tiny: LoadTiny) -> tuple[SlotManager, Sequence[PlainCache]]:
    """Eight, and a prompt of four tokens that may join."""
    model = load_tiny("llama")
    slots = SlotManager(model.make_cache())
    cache = model.make_cache()
    mx.eval(model.hidden(mx.array([[5, 9, 4, 17]]), cache, None))
    slots.metadata.shape = BufferShape(8, 32)
    return slots, cache


def test_rows_have_joined_before_operations_of_mlx_may_read_them(
    load_tiny: LoadTiny, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, cache = free_slots(load_tiny)
    copies: list[mx.array] = []
    evaluated: list[int] = []
    evaluate = mx.eval

    def noted_copy(*_: object, **__: object) -> mx.array:
        copies.append(mx.zeros((1,), mx.int32))
        return copies[-1]

    def noted_eval(arrays: Sequence[mx.array]) -> None:
        evaluated.extend(map(id, arrays))
        evaluate(arrays)

    monkeypatch.setattr("parallm.engine.kv.slot_manager.copy_to_slots", noted_copy)
    monkeypatch.setattr(mx, "eval", noted_eval)
    for widths in ([], [], [2] * 3):
        slots.join(cache, [0], [4])
        slots.begin_step([4] * len(copies), widths)
    first, second, third = map(id, copies)
    assert first in evaluated, "nobody knows yet who will read"
    assert second not in evaluated, "the kernel reads after it in the stream"
    assert third in evaluated, "rows of several tokens are read by MLX"


def test_a_row_that_leaves_and_one_that_joins_write_no_other_slot(
    load_tiny: LoadTiny, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, cache = free_slots(load_tiny)
    slots.join(cache, [0] * 6, [4] * 6)
    before = [np.array(pool) for pool in slots.buffers]
    slots.leave([(1, 5)], [4], 1, waits=False)
    slots.begin_step([4] * 5)
    assert slots.metadata.slots_B.tolist() == [0, 5, 2, 3, 4], "the last row took the place, not the slot"
    monkeypatch.setattr(SlotCache, "resize", lambda *_: pytest.fail("pools were copied"))
    slots.join(cache, [0], [2])
    slots.begin_step([4] * 6)
    assert slots.metadata.slots_B.tolist() == [0, 5, 2, 3, 4, 1]
    for pool, was in zip(slots.buffers, before, strict=True):
        assert np.array_equal(np.array(pool), was)
