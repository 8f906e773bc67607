"""The compiled forward gives what the other one gives, and is traced once per bucket of shapes."""

import shutil
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from parallm.engine.decode_batch import CompiledForward, DecodeBatchFactory, SlotDecodeBatch, row_bucket
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.budget import measure_cost
from parallm.engine.kv.shapes import in_quarters
from parallm.engine.sequence import PrefillJob, make_sequences
from parallm.model.adapters.adapter import Adapter
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for a CPU with g++")


def make_batch(model: SharedModel, *, compiles: bool) -> SlotDecodeBatch:
    compiled = CompiledForward(model) if compiles else None
    return SlotDecodeBatch(model, measure_cost(model), compiled=compiled)


def joined_rows(batch: SlotDecodeBatch, model: SharedModel, ask: Callable[..., GenerationRequest], count: int) -> None:
    for row in range(len(batch.sequences), count):
        request, cache = ask(f"r{row}", [5 + row, 7, 9 + 2 * row][: 1 + row % 3], 40), model.make_cache()
        mx.eval(model.hidden(mx.array([request.prompt_tokens]), cache, None))
        (joining,) = make_sequences(request, None, is_streaming=False, arrival=row, max_context=64)
        joining.tokens.append(3 + row)
        job = PrefillJob.of([joining])
        job.cache = cache
        batch.join([(job, joining)])


def steps(batch: SlotDecodeBatch, loras: LoraSelector, adapter: Adapter | None, num_rows: int, count: int) -> mx.array:
    """Hidden states of the last of `count` steps."""
    for row in batch.sequences:
        row.adapter = adapter
    for _ in range(count):
        hidden_BH = batch.forward(loras, num_rows, mx.array([row.tokens[-1] for row in batch.sequences[:num_rows]]))
        mx.eval(hidden_BH)
        for row in batch.sequences[:num_rows]:
            row.tokens.append(11 + len(row.tokens))
    return hidden_BH


@needs_compiler
def test_the_compiled_forward_gives_the_same_hidden_states(
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
) -> None:
    model = load_tiny("gemma3_text")  # some of its layers see a window
    loras = LoraSelector(model)
    batches = [make_batch(model, compiles=compiles) for compiles in (False, True)]
    adapters = [None, random_adapter(model, 1), random_adapter(model, 2), random_adapter(model, 3, dora=True)]
    for adapter, num_rows in zip(adapters, (3, 5, 5, 9), strict=True):
        for batch in batches:
            joined_rows(batch, model, ask, num_rows)
        plain, compiled = (steps(batch, loras, adapter, num_rows, 3) for batch in batches)
        assert mx.abs(plain - compiled).max().item() <= 2e-5
        assert mx.abs(plain).max().item() > 0.1


@pytest.mark.cpu
@needs_compiler
def test_a_step_of_known_shapes_runs_no_module_again(
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("llama")
    loras, batch = LoraSelector(model), make_batch(model, compiles=True)
    joined_rows(batch, model, ask, 7)
    traced: list[int] = []
    hidden = SharedModel.hidden

    def noted(self: SharedModel, tokens_BT: mx.array, *others: Any) -> mx.array:
        traced.append(tokens_BT.shape[0])
        return hidden(self, tokens_BT, *others)

    monkeypatch.setattr(SharedModel, "hidden", noted)
    for adapter, num_rows in [(None, 7), (None, 5), (random_adapter(model, 1), 7), (random_adapter(model, 2), 6)]:
        steps(batch, loras, adapter, num_rows, 2)
    assert traced == [8, 8], "once for the base, once for adapters of one structure"


@pytest.mark.cpu
@needs_compiler
def test_batches_share_their_traces(
    load_tiny: Callable[..., SharedModel], ask: Callable[..., GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama")
    monkeypatch.setattr("parallm.engine.decode_batch.on_cuda", lambda: True)
    make = DecodeBatchFactory(model, measure_cost(model))
    traced = 0
    set_traced = AttentionMetadata.set_traced

    def noted(self: AttentionMetadata, *arrays: Any, **others: Any) -> None:
        nonlocal traced
        traced += 1
        set_traced(self, *arrays, **others)

    monkeypatch.setattr(AttentionMetadata, "set_traced", noted)
    for _ in range(3):
        batch = make()
        assert isinstance(batch, SlotDecodeBatch)
        joined_rows(batch, model, ask, 3)
        steps(batch, LoraSelector(model), None, 3, 2)
    assert traced == 1


@needs_compiler
def test_batches_know_from_each_other_that_slots_must_be_contiguous(
    load_tiny: Callable[..., SharedModel], ask: Callable[..., GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama")
    for module in ("decode_batch", "kv.attention_metadata"):
        monkeypatch.setattr(f"parallm.engine.{module}.on_cuda", lambda: True)
    make = DecodeBatchFactory(model, measure_cost(model))
    for _ in range(2):
        batch = make()
        assert isinstance(batch, SlotDecodeBatch)
        joined_rows(batch, model, ask, 3)
        assert not batch._slots.metadata.is_contiguous
        steps(batch, LoraSelector(model), None, 3, 2)
        assert batch._slots.metadata.is_contiguous


@pytest.mark.parametrize(
    ("number", "found"), [(1, 256), (257, 512), (1025, 1280), (2048, 2048), (2049, 2560), (8192, 8192), (8193, 10240)]
)
def test_tight_pools_have_four_lengths_between_two_doublings(number: int, found: int) -> None:
    assert in_quarters(256, number) == found


@needs_compiler
def test_a_compiled_step_writes_into_the_pools_without_a_copy(
    load_tiny: Callable[..., SharedModel], ask: Callable[..., GenerationRequest]
) -> None:
    model = load_tiny("llama")
    loras, batch = LoraSelector(model), make_batch(model, compiles=True)
    joined_rows(batch, model, ask, 8)
    batch._reserve(8, 32768)
    steps(batch, loras, None, 8, 2)
    pools = sum(pool.nbytes for pool in batch._slots.buffers)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tokens = mx.array([row.tokens[-1] for row in batch.sequences])
    hidden_BH = batch.forward(loras, 8, tokens)
    mx.eval(hidden_BH, *batch._slots.buffers)
    assert mx.get_peak_memory() - before < pools // 2


def test_rows_are_computed_in_few_sizes() -> None:
    assert [row_bucket(rows) for rows in (1, 2, 4, 5, 9, 17, 33, 65, 100, 128, 129)] == [
        1,
        4,
        4,
        8,
        16,
        24,
        48,
        96,
        128,
        128,
        160,
    ]


def test_a_model_that_reads_arrays_while_it_runs_is_not_compiled(
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_tiny("llama")
    loras, batch = LoraSelector(model), make_batch(model, compiles=True)
    joined_rows(batch, model, ask, 2)
    hidden = SharedModel.hidden

    def reading(self: SharedModel, tokens_BT: mx.array, *others: Any) -> mx.array:
        assert tokens_BT.tolist()
        return hidden(self, tokens_BT, *others)

    monkeypatch.setattr(SharedModel, "hidden", reading)
    assert steps(batch, loras, None, 2, 2).shape[0] == 2
    assert caplog.text.count("decoding is not compiled") == 1
