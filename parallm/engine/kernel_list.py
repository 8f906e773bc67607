"""The CUDA kernels that an engine launches for a model: found by building its forwards, which nothing evaluates."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from parallm.engine.captured_forward import list_kernels as list_captures
from parallm.engine.decode_batch import row_bucket
from parallm.engine.flat_prefill import list_kernels as list_flat_prefill
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.paged_cache import PagedCache, make_pools
from parallm.engine.kv.shapes import STEP, BufferShape
from parallm.engine.memory import has_pages
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels.add_norm import fits
from parallm.model.kernels.compiler import Specialization
from parallm.model.kernels.cuda import captured_launches, has_kernels, listed_kernels, uploaded
from parallm.model.kernels.delta_chunks import with_any_rows
from parallm.model.kernels.gather import take_in_groups, take_rows
from parallm.model.kernels.page_copy import copy_pages
from parallm.model.kernels.page_write import PAGE
from parallm.model.kernels.slot_copy import can_copy, copy_out, copy_to_slots
from parallm.model.kernels.small_batch_gemm import MAX_CAPTURED_ROWS
from parallm.model.kernels.token_draw import draw_tokens, score_tokens
from parallm.model.kernels.token_filter import ends_by_kernel, weights_by_kernel
from parallm.model.logprobs import softmax_of
from parallm.model.lora.linear import list_norms, merged_linears
from parallm.model.lora.segmented import MIN_LONG, PackedLora, SegmentedLora, order_rows
from parallm.model.lora.selector import LoraSelector
from parallm.model.patches.forward import whole_stream
from parallm.model.shared_model import PlainCache, SharedModel

SHAPES = ((1, 4096), (1024, 256))
"""Rows and positions of steps whose attention shares a row between blocks, and does not."""
MAX_BUCKET = 256
"""Rows from which on packed weights of any form are unpacked."""


def engine_kernels(model: SharedModel, adapter: Adapter, settings: EngineSettings) -> list[Specialization]:
    """The kernels of prompts and of steps of any number of rows, of the base and of one or two versions like `adapter`.

    Device thread only.
    """
    if not has_kernels() or not model.is_batch_invariant:
        return []
    with listed_kernels() as kernels:
        prompts = model.make_cache()
        hidden_1TH = model.hidden(mx.zeros((1, STEP), mx.int32), prompts, None)
        if has_pages(model, settings):
            list_flat_prefill(model)
            take_rows(hidden_1TH[0, ...], mx.zeros((1,), mx.int32))
            for rows, positions in SHAPES:
                _paged_step(model, rows, positions)
            list_captures()
        else:
            take_in_groups(hidden_1TH, mx.zeros((1, 1), mx.int32))
            for rows, positions in SHAPES:
                _step(model, prompts, BufferShape(rows, positions))
        _sampling(model.head(hidden_1TH[0, :1]))
        buckets = sorted({row_bucket(rows) for rows in range(1, MAX_BUCKET + 1)})
        for rows in buckets:
            model.head(mx.zeros((rows, hidden_1TH.shape[-1]), model.dtype))
        most = min(settings.max_rows or MAX_CAPTURED_ROWS, MAX_CAPTURED_ROWS)
        captured = sorted({row_bucket(rows) for rows in range(1, most + 1)})
        for lora in (None, *_loras(model, adapter)):
            if fits(None, stream_11H := mx.zeros((1, 1, hidden_1TH.shape[-1]), model.dtype)):
                list_norms(whole_stream(stream_11H), lora)
            for merged in {merged.form(lora): merged for merged in merged_linears(model.base)}.values():
                for rows, tokens in (*((rows, 1) for rows in buckets), (1, STEP), (1, MIN_LONG)):
                    merged.list_kernels(mx.zeros((rows, tokens, merged.num_inputs), model.dtype), lora)
                with captured_launches():
                    for rows in captured:
                        merged.list_kernels(mx.zeros((rows, 1, merged.num_inputs), model.dtype), lora)
    return with_any_rows(kernels)


def _step(model: SharedModel, prompts: Sequence[PlainCache], shape: BufferShape) -> None:
    """Build the graph of a step of as many rows as slots, which join with these prompts and leave."""
    metadata, rows = AttentionMetadata(), mx.arange(shape.num_slots, dtype=mx.int32)
    metadata.shape = shape
    metadata.set_traced(rows, rows, num_positions=shape.num_positions)
    caches = [SlotCache(metadata) for _ in prompts]
    for cache, layer in zip(caches, prompts, strict=True):
        cache.allocate(layer)
    prompts_N = [array for layer in prompts for array in (layer.keys, layer.values)]
    buffers_N = [array for cache in caches for array in cache.state]
    if can_copy(prompts_N, buffers_N):
        copy_to_slots(prompts_N, buffers_N, rows=[0], slots=[0], lengths=[STEP])
        copy_out(buffers_N, 0, 0, STEP)
    model.hidden(rows[:, None], caches, None)


def _paged_step(model: SharedModel, rows: int, positions: int) -> None:
    """Build the graph of a step of rows with tables of as many positions, of which one joins a group."""
    metadata, lengths_B = AttentionMetadata(), mx.zeros(rows, mx.int32)
    metadata.set_traced(lengths_B, mx.zeros((rows, positions // PAGE), mx.int32), num_positions=positions)
    layers = make_pools(model, 1)
    copy_pages([array for layer in layers for array in layer], [0], [0])
    model.hidden(lengths_B[:, None], [PagedCache(metadata, layer) for layer in layers], None)


def _sampling(logits_1V: mx.array) -> None:
    """Build the graph of sampling: as it comes, and from logits that are processed, which are float32, and filtered."""
    uploaded(np.zeros(1, np.int32))
    uploaded(np.zeros(1, np.float32))
    ones_1, limits_1, tokens_1 = mx.ones(1), mx.ones(1, mx.uint64), mx.zeros(1, mx.int32)
    for chosen_1V in (logits_1V, logits_1V.astype(mx.float32)):
        for uniforms_12 in (None, mx.zeros((1, 2))):
            draw_tokens(chosen_1V, ones_1, uniforms_12)
    score_tokens(logits_1V, ones_1, tokens_1)
    softmax = softmax_of(logits_1V, ones_1)
    softmax.logprobs(tokens_1[:, None])
    take_rows(tokens_1[:, None], tokens_1)
    weights_by_kernel(softmax, *ends_by_kernel(softmax, limits_1, limits_1), ones_1)


def _loras(model: SharedModel, adapter: Adapter) -> list[SegmentedLora]:
    """One version, and two as while a policy's next version takes over."""
    lora = LoraSelector(model).select([adapter])
    if not isinstance(lora, SegmentedLora):
        return []
    pairs = tuple(mx.concatenate([array, array]) for array in lora.weights.arrays)
    both = PackedLora(layout=lora.weights.layout, arrays=pairs)
    return [lora, SegmentedLora(weights=both, order_B2=order_rows([0, 1], 2))]
