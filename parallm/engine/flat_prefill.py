"""Computes prompts of any lengths as one flat row of tokens, into pages; CUDA only.

A unit takes a number of tokens and not of prompts: short prompts lie one after the other, and a long one is cut into
chunks, as in SARATHI (https://arxiv.org/abs/2308.16369). Linear layers, norms and rotary embeddings see every token as
a row. A layer attends in one launch, reads earlier chunks and cached prefixes in the pages where they are, and writes
its keys and values there. Units of one size are padded to one shape, so MLX finds buffers and CUDA graphs of earlier
units. Each token attends in the same order whatever lies beside it.

Axes: M tokens of a unit, S prompts, N pages, Q query heads, H key-value heads, D head size, V vocabulary.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.engine.decoder import Decoder
from parallm.engine.kv.shapes import STEP, padded
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.sequence import PrefillJob
from parallm.engine.settings import EngineSettings
from parallm.model.kernels.cuda import MIN_ON_DEVICE, has_kernels, listed_kernels
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.flash_attention import attend_pages, page_tiles
from parallm.model.kernels.page_write import PAGE, write_pages
from parallm.model.kernels.rotary import Rotation
from parallm.model.lora.selector import LoraSelector
from parallm.model.patches.forward import OwnCache
from parallm.model.patches.rotary import before_rotation
from parallm.model.shared_model import SharedModel

CHUNK = 2048
"""Default tokens of a unit: a GPU is full with them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `start` to `end` of a sequence that has these pages."""

    start: int
    end: int
    pages: Ordered[int]

    @property
    def size(self) -> int:
        return self.end - self.start


class FlatLayout:
    """Where the tokens of a unit are, for all layers: chunks one after the other, and padding."""

    def __init__(self, chunks: Ordered[Chunk], num_tokens: int) -> None:
        """Padding fills the unit up to `num_tokens`; it writes to the scratch page 0, and sees nothing."""
        num_padding = num_tokens - sum(chunk.size for chunk in chunks)
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        slots = [
            np.asarray(chunk.pages)[own // PAGE] * PAGE + own % PAGE
            for chunk, own in zip(chunks, positions, strict=True)
        ]
        tables_SN = np.zeros((len(chunks), max(MIN_ON_DEVICE, *(len(chunk.pages) for chunk in chunks))), np.int32)
        for row, chunk in enumerate(chunks):
            tables_SN[row, : len(chunk.pages)] = chunk.pages
        self._lengths = [(chunk.size, chunk.start) for chunk in chunks]
        self.num_tokens = num_tokens
        self.positions_M = _int32(*positions, np.zeros(num_padding))
        self.slots_M = _int32(*slots, np.arange(num_padding) % PAGE)
        self.tables_SN = mx.array(tables_SN)
        self._tiles: dict[tuple[int, int], mx.array] = {}
        self._rotary: dict[Rotation, RotaryAngles] = {}

    def tiles(self, repeats: int, head_size: int) -> mx.array:
        """What the blocks of a layer attend to, `repeats` query heads for each of keys; see `page_tiles`."""
        key = repeats, head_size
        if key not in self._tiles:
            self._tiles[key] = mx.array(page_tiles(self._lengths, self.num_tokens, *key).astype(np.int32))
        return self._tiles[key]

    def rotary(self, rotation: Rotation) -> RotaryAngles:
        if rotation not in self._rotary:
            angles = rotation.angles(self.positions_M)
            self._rotary[rotation] = RotaryAngles(angles=angles, traditional=rotation.traditional)
        return self._rotary[rotation]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A mask: a token sees itself and the `size` - 1 tokens before it."""

    size: int


class FlatLayer(OwnCache):
    """The cache of a layer in a flat forward."""

    def __init__(self, layout: FlatLayout, keys_PHTD: mx.array, values_PHTD: mx.array) -> None:
        self.has_attended = False
        self._layout = layout
        self._pages = keys_PHTD, values_PHTD
        self._new: tuple[mx.array, ...] = ()

    @property
    def offset(self) -> mx.array:
        """Position of each token, (M,): what rotary embeddings need."""
        return self._layout.positions_M

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> SlidingWindow | None:
        assert not return_array, "a model that computes with masks cannot be flat"
        return None if window_size is None else SlidingWindow(window_size)

    def update_and_fetch(self, keys_MH1D: mx.array, values_MH1D: mx.array) -> tuple[mx.array, mx.array]:
        """The same arrays: `attend` writes them into pages."""
        self._new = keys_MH1D, values_MH1D
        return keys_MH1D, values_MH1D

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Queries (M, Q, 1, D), keys and values (M, H, 1, D) -> (M, Q, 1, D)."""
        own = self._new and self._new[0] is keys and self._new[1] is values
        assert own, "a layer attends once, to keys and values of its own"
        self.has_attended, self._new = True, ()
        window = mask.size if isinstance(mask, SlidingWindow) else None
        layout, (keys_PHTD, values_PHTD) = self._layout, self._pages
        queries, keys, rotation = before_rotation(queries, keys, self.offset, keys_PHTD.dtype)
        rotary = None if rotation is None else layout.rotary(rotation)
        queries_MQD = write_pages([queries, keys, values], keys_PHTD, values_PHTD, layout.slots_M, rotary)
        tiles = layout.tiles(queries.shape[1] // keys.shape[1], queries.shape[3])
        attended_MQD = attend_pages(
            queries_MQD, keys_PHTD, values_PHTD, layout.tables_SN, tiles, scale=scale, window=window, sinks_Q=sinks
        )
        return attended_MQD[:, :, None]


class FlatPrefill:
    """The interface is that of `Prefill`."""

    def __init__(self, model: SharedModel, loras: LoraSelector, memory: PagedMemory, settings: EngineSettings) -> None:
        self.num_prompt_tokens = 0
        """Tokens of all jobs that have begun, cached ones included."""
        self.num_cached_tokens = 0
        """Tokens of these that came from the prefix cache."""
        self._model = model
        self._loras = loras
        self._memory = memory
        self._chunk = settings.prefill_chunk or CHUNK
        self._plan: list[tuple[PrefillJob, Chunk]] = []  # what `for_one_unit` has chosen

    @property
    def max_jobs(self) -> int:
        """Jobs that one unit may compute."""
        return self._chunk

    def for_one_unit(self, jobs: Ordered[PrefillJob]) -> list[PrefillJob]:
        """The first job, and those after it of its adapter version, as many as have tokens in the unit. They begin."""
        self._plan = self._planned(jobs)
        return [job for job, _ in self._plan]

    def compute(self, jobs: Ordered[PrefillJob]) -> list[mx.array]:
        """Compute the next tokens of what `for_one_unit` chose; returns what to evaluate."""
        plan, self._plan = self._plan, []
        assert [job for job, _ in plan] == list(jobs), "what was chosen last"
        _, adapter = jobs[0].segment()
        used = sum(chunk.size for _, chunk in plan)
        layout = FlatLayout([chunk for _, chunk in plan], padded(used))
        caches = [FlatLayer(layout, *pages) for pages in self._memory.layers]
        tokens = np.concatenate([job.tokens[chunk.start : chunk.end] for job, chunk in plan])
        tokens_M = mx.array(np.pad(tokens, (0, layout.num_tokens - used)).astype(np.int32))
        lora = self._loras.select([adapter] * layout.num_tokens)
        hidden_MH = self._model.hidden(tokens_M[:, None], caches, lora)[:, 0]
        computed: list[mx.array] = []
        ends = list(accumulate(chunk.size for _, chunk in plan))
        for (job, chunk), end in zip(plan, ends, strict=True):
            if job.scorer is not None:
                hidden_TH = hidden_MH[end - chunk.size : end]
                computed += job.scorer.add(self._model, hidden_TH, job.tokens[chunk.start + 1 : chunk.end + 1])
            job.num_computed = chunk.end
        done = [(job, end - 1) for (job, _), end in zip(plan, ends, strict=True) if job.num_computed == len(job.tokens)]
        if not done:
            return [*computed, hidden_MH[:1]]
        logits_SV = self._model.head(hidden_MH[mx.array([last for _, last in done])])
        for row, (job, _) in enumerate(done):
            job.logits_V = logits_SV[row]
            self._memory.keep(job.sequences[0], job.table, len(job.tokens))
        return [*computed, logits_SV]

    def keep_ended(self, decoder: Decoder) -> list[mx.array]:
        """Cache what sequences that have ended computed; nothing has to be evaluated."""
        for sequence, table in zip(decoder.sequences, decoder.batch.tables, strict=True):
            if sequence.finish_reason is not None and sequence.request.is_continued and not sequence.is_broken:
                num_computed = len(sequence.request.prompt_tokens) + len(sequence.tokens) - 1
                self._memory.keep(sequence, table, num_computed)
        return []

    def _planned(self, jobs: Ordered[PrefillJob]) -> list[tuple[PrefillJob, Chunk]]:
        """Jobs that fit one unit, with their next tokens."""
        plan: list[tuple[PrefillJob, Chunk]] = []
        num_free, unit_adapter = self._chunk, jobs[0].segment()[1]
        for job in jobs:
            if num_free == 0:
                break
            if job.segment()[1] is not unit_adapter and plan:
                continue
            if job.num_computed == 0:
                self._begin(job)
            end, adapter = job.segment()
            if not plan:
                unit_adapter = adapter
            if adapter is unit_adapter:
                assert job.table is not None, "a job begins with pages"
                chunk = Chunk(job.num_computed, min(end, job.num_computed + num_free), job.table.pages)
                plan.append((job, chunk))
                num_free -= chunk.size
        return plan

    def _begin(self, job: PrefillJob) -> None:
        num_cached = self._memory.begin(job)
        self.num_prompt_tokens += len(job.tokens)
        self.num_cached_tokens += num_cached
        for sequence in job.sequences if num_cached else ():
            if not sequence.tokens:
                sequence.num_cached_prompt_tokens = num_cached


def fits(model: SharedModel) -> bool:
    """Whether a flat forward computes the model here: its layers mix tokens by attention alone, each over keys and
    values of its own that the kernels take. Evaluates nothing, and compiles nothing."""
    if not has_kernels() or not model.is_batch_invariant:
        return False
    with listed_kernels():
        return _builds(model)


def list_kernels(model: SharedModel) -> None:
    """Build a flat forward of a model that `fits`; see `listed_kernels`."""
    _builds(model)


def _builds(model: SharedModel) -> bool:
    plain = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), plain, None)
    layout = FlatLayout([Chunk(0, STEP, range(1, 1 + STEP // PAGE))], STEP)
    shapes = [(layer.keys, layer.values) for layer in plain]
    layers = [
        FlatLayer(layout, *(mx.zeros((1, array.shape[1], PAGE, array.shape[3]), array.dtype) for array in pair))
        for pair in shapes
    ]
    try:
        model.hidden(mx.zeros((STEP, 1), mx.int32), layers, None)
    except (AssertionError, AttributeError, TypeError, ValueError):  # shapes or masks that a layer does not understand
        return False
    return all(layer.has_attended for layer in layers)


def _int32(*parts: np.ndarray) -> mx.array:
    return mx.array(np.concatenate(parts).astype(np.int32))
