"""Computes prompts in chunks, each alone with a plain causal mask, and preempted sequences as they were computed
before.

With MLX's CUDA build, jobs that begin at the same position are rows of one forward, which takes Python milliseconds,
whatever it holds. On a CPU only recurrent models gain by that, whose layers are many small operations. Rows are padded,
which causal attention hides, to lengths that are few (`row_positions`), and rows of one forward have the same: then
attention and chunks of a prompt have the same shapes in any company. Recurrent states are those after each row's own
tokens; they cannot be cut, so that such models have no prefix cache.

Axes: B jobs, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from parallm.device.streams import DeviceStreams
from parallm.engine.decoder import Decoder
from parallm.engine.flat_prefill import FlatPrefill
from parallm.engine.kv.prefix_cache import Hit, Owner, layers_of, row_copies, stacks_of
from parallm.engine.kv.shapes import BLOCK, blocks, padded, reusable, row_positions
from parallm.engine.memory import KvMemory
from parallm.engine.paged_batch import PagedDecodeBatch
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.settings import EngineSettings
from parallm.engine.slot_memory import SlotMemory
from parallm.engine.state_trial import pads_prompts
from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.gather import take_in_groups
from parallm.model.lora.selector import LoraSelector
from parallm.model.patches.recurrence import padding
from parallm.model.shared_model import SharedModel, leaves

CHUNK, CUDA_CHUNK = 512, 2048
"""Default tokens of a chunk: a GPU is full with the larger one."""


def chunk_tokens(settings: EngineSettings) -> int:
    """Prompt tokens in one unit of device work."""
    return settings.prefill_chunk or (CUDA_CHUNK if on_cuda() else CHUNK)


class Prefill:
    takes_turns = False
    """Whether the first prompts of a burst decode before the last ones are computed: a CPU is faster with many rows."""

    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        loras: LoraSelector,
        memory: SlotMemory,
        settings: EngineSettings,
        is_servable: Callable[[str, int], bool],
    ) -> None:
        """`is_servable`: whether a request can still name an adapter of this name and version."""
        self.num_prompt_tokens = 0
        """Tokens of all jobs that have begun, cached ones included."""
        self.num_cached_tokens = 0
        """Tokens of these that came from the prefix cache."""
        self._model = model
        self._streams = streams
        self._loras = loras
        self._memory = memory
        self._prefixes = memory.prefixes
        self._chunk = chunk_tokens(settings)
        self._is_servable = is_servable
        self._uses_cache = settings.prefix_cache and model.is_batch_invariant
        are_rows = memory.make_batch.is_batched and (
            pads_prompts(model) if model.has_states else model.is_batch_invariant and on_cuda()
        )
        self.max_positions = self._chunk if are_rows else 0
        """Positions of one forward over several jobs; 0: each job is computed alone."""
        self._forwards: list[list[PrefillJob]] = []  # jobs of each forward that `for_one_unit` has chosen

    @property
    def max_jobs(self) -> int:
        """Jobs that one unit may compute: for each stream one, or as many as a forward takes."""
        return self._streams.width * max(1, self.max_positions // row_positions(1))

    def for_one_unit(self, jobs: Ordered[PrefillJob]) -> list[PrefillJob]:
        """The jobs of one unit: for each stream the first one left, and those that share its forward."""
        self._forwards, left = [], list(jobs)
        while left and len(self._forwards) < self._streams.width:
            most = -(-len(left) // (self._streams.width - len(self._forwards)))
            chosen = self._sharing(left, most)
            self._forwards.append(chosen)
            left = [job for job in left if job not in chosen]
        return [job for chosen in self._forwards for job in chosen]

    def _sharing(self, jobs: Ordered[PrefillJob], most: int) -> list[PrefillJob]:
        """The first job, and at most `most` in all that a forward computes with it."""
        shape = self._shape(jobs[0])
        if shape is None:
            return [jobs[0]]
        alike = [job for job in jobs if job.segment()[1] is jobs[0].segment()[1] and self._shape(job) == shape]
        return alike[: max(1, min(most, self.max_positions // shape[1]))]

    def compute(self, jobs: Ordered[PrefillJob]) -> list[list[mx.array]]:
        """Compute what `for_one_unit` chose; returns what to evaluate."""
        forwards, self._forwards = self._forwards, []
        assert [job for chosen in forwards for job in chosen] == list(jobs), "what was chosen last"
        return self._streams.run(self._compute_forward, forwards)

    def _compute_forward(self, jobs: Ordered[PrefillJob]) -> list[mx.array]:
        return self.compute_chunk(jobs[0]) if self._shape(jobs[0]) is None else self.compute_together(jobs)

    def compute_together(self, jobs: Ordered[PrefillJob]) -> list[mx.array]:
        """Compute jobs to their ends in one forward; returns what to evaluate."""
        shape = self._shape(jobs[0])
        assert shape is not None, "a job that shares forwards"
        num_cached, width = shape
        cache = self._begin(jobs, num_cached + width)
        uncached = [job.tokens[job.num_computed :] for job in jobs]
        tokens_BT = [[*tokens, *tokens[-1:] * (width - len(tokens))] for tokens in uncached]
        lora = self._loras.select([jobs[0].segment()[1]] * len(jobs))
        with padding(leaves(cache), [len(tokens) for tokens in uncached], width):
            hidden_BTH = self._model.hidden(mx.array(tokens_BT, mx.int32), cache, lora)
        last_B1 = mx.array([[len(tokens) - 1] for tokens in uncached])
        logits_BV = self._model.head(take_in_groups(hidden_BTH, last_B1)[:, 0])
        computed = [logits_BV, *_states(cache)]
        stacks = []
        if self._uses_cache:
            stacks = stacks_of([array for layer in cache for array in (layer.keys, layer.values)])
        for job in jobs:
            job.num_computed, job.logits_V = len(job.tokens), logits_BV[job.cache_row, ...]
            computed += self._keep(job.sequences[0], len(job.tokens), partial(_copies, stacks, job.cache_row))
        return computed

    def compute_chunk(self, job: PrefillJob) -> list[mx.array]:
        """Compute the next chunk of a job; returns what to evaluate."""
        if job.num_computed == 0:
            self._begin([job], job.num_allocated)
        segment_end, adapter = job.segment()
        chunk = job.tokens[job.num_computed : self._chunk_end(job.num_computed, segment_end)]
        # Padding after the chunk, which causal attention hides, makes products of the right sizes
        most = job.num_allocated - job.num_computed
        num_padding = min(padded(len(chunk)), most) - len(chunk) if self._model.is_batch_invariant else 0
        tokens_1T = mx.array([[*chunk, *chunk[-1:] * num_padding]], mx.int32)
        hidden_1TH = self._model.hidden(tokens_1T, job.cache, self._loras.select([adapter]))
        if num_padding:
            for layer in job.cache:
                layer.trim(num_padding)
        computed: list[mx.array] = []
        if job.scorer is not None:
            next_tokens = job.tokens[job.num_computed + 1 : job.num_computed + len(chunk) + 1]
            computed += job.scorer.add(self._model, hidden_1TH[0, ...], next_tokens)
        job.num_computed += len(chunk)
        computed += _states(job.cache)
        if job.num_computed == len(job.tokens):
            last = len(chunk) - 1
            job.logits_V = self._model.head(hidden_1TH[0, last : last + 1])[0, ...]
            kept = self._keep(job.sequences[0], len(job.tokens), partial(_first_copies, job.cache))
            computed += [job.logits_V, *kept]
        return computed

    def keep_ended(self, decoder: Decoder) -> list[mx.array]:
        """Cache what sequences that have ended computed; returns what to evaluate before their slots change."""
        kept: list[mx.array] = []
        assert not isinstance(decoder.batch, PagedDecodeBatch)
        for index, sequence in enumerate(decoder.sequences):
            if sequence.finish_reason is not None and sequence.request.is_continued and not sequence.is_broken:
                num_computed = len(sequence.request.prompt_tokens) + len(sequence.tokens) - 1
                kept += self._keep(sequence, num_computed, partial(decoder.batch.copies, index))
        return kept

    def _keep(
        self, sequence: Sequence, num_computed: int, copy: Callable[[int, int], list[mx.array]]
    ) -> list[mx.array]:
        if not self._uses_cache:
            return []
        self._prefixes.forget(self._is_servable)
        end, adapter = sequence.segments()[0]  # only what one version has computed
        tokens = (*sequence.request.prompt_tokens, *sequence.tokens)[: min(end, num_computed)]
        owner = Owner.of(adapter, sequence.request.cache_salt)
        per_token, num_free = self._memory.budget.cost.per_token, self._memory.num_free_bytes()
        return self._prefixes.add(owner, tokens, copy, per_token, num_free)

    def _begin(self, jobs: Ordered[PrefillJob], num_positions: int) -> list[Any]:
        """A cache with a row of `num_positions` for each job, where mlx-lm's caches would grow and copy, filled with
        what is cached, as many tokens for each."""
        cache, hits = self._model.make_cache(), [self._match(job) for job in jobs]
        num_cached = hits[0].num_tokens if hits[0] else 0
        for row, job in enumerate(jobs):
            job.cache, job.cache_row, job.num_computed = cache, row, num_cached
            self.num_prompt_tokens += len(job.tokens)
            self.num_cached_tokens += num_cached
            for sequence in job.sequences if num_cached else ():
                if not sequence.tokens:
                    sequence.num_cached_prompt_tokens = num_cached
        if self._model.is_batch_invariant or self._model.has_states:
            _allocate(cache, num_positions, [hit for hit in hits if hit])
        return cache

    def _match(self, job: PrefillJob) -> Hit | None:
        """The cached prefix of a job that begins."""
        if not self._uses_cache or job.scorer is not None:
            return None
        return self._prefixes.match(*self._prefix(job))

    def _prefix(self, job: PrefillJob) -> tuple[Owner, Ordered[int], int]:
        """Owner, tokens, and the number of cached tokens to take."""
        end, adapter = job.segment()
        most = min(end, len(job.tokens) - MIN_ROWS)  # the rest gives the logits, in products of enough rows
        owner = Owner.of(adapter, job.request.cache_salt)
        return owner, job.tokens, reusable(self._prefixes.num_cached(owner, job.tokens, most))

    def _shape(self, job: PrefillJob) -> tuple[int, int] | None:
        """Cached tokens of a job, and its positions in a forward over several jobs; None where it is computed alone, in
        chunks."""
        if not self.max_positions or job.num_computed or job.scorer is not None:
            return None
        num_cached = self._prefix(job)[2] if self._uses_cache else 0
        num_uncached = len(job.tokens) - num_cached
        if job.segment()[0] < len(job.tokens) or num_uncached > self.max_positions:
            return None
        return num_cached, row_positions(num_uncached)

    def _chunk_end(self, start: int, segment_end: int) -> int:
        """A chunk's end, a little earlier where the remainder would be too few rows for exact products."""
        end = min(start + self._chunk, segment_end)
        return end - (MIN_ROWS if 0 < segment_end - end < MIN_ROWS else 0)


def make_prefill(
    model: SharedModel,
    streams: DeviceStreams,
    loras: LoraSelector,
    memory: KvMemory,
    settings: EngineSettings,
    is_servable: Callable[[str, int], bool],
) -> Prefill | FlatPrefill:
    """The one that computes into what `memory` has."""
    if isinstance(memory, PagedMemory):
        return FlatPrefill(model, loras, memory, settings)
    return Prefill(model, streams, loras, memory, settings, is_servable)


def _allocate(cache: Ordered[Any], num_positions: int, hits: Ordered[Hit]) -> None:
    """Let caches have `num_positions` from the beginning; `hits`, one for each row, fill the first of them."""
    size = blocks(num_positions) * BLOCK
    for layer in leaves(cache):
        if isinstance(layer, KVCache):
            layer.step = size
    if not hits:
        return
    num_cached = hits[0].num_tokens
    padding = [(0, 0), (0, 0), (0, size - num_cached), (0, 0)]
    arrays = layers_of([hit.arrays() for hit in hits])
    for layer, keys_BHTD, values_BHTD in zip(cache, arrays[::2], arrays[1::2], strict=True):
        layer.keys, layer.values = mx.pad(keys_BHTD, padding), mx.pad(values_BHTD, padding)
        layer.offset = num_cached


def _first_copies(cache: Ordered[Any], start: int, end: int) -> list[mx.array]:
    """`row_copies` of the only row of a cache."""
    return row_copies([array[:, :, start:end] for layer in cache for array in (layer.keys, layer.values)])


def _copies(stacks_NBHTD: Ordered[mx.array], row: int, start: int, end: int) -> list[mx.array]:
    """`row_copies` of one of several rows."""
    return [mx.contiguous(stack[:, row, :, start:end]) for stack in stacks_NBHTD]


def _states(cache: Ordered[Any]) -> list[mx.array]:
    parts = tree_flatten([layer.state for layer in cache])
    return [part for _, part in parts if isinstance(part, mx.array)]
