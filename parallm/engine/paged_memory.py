"""Memory of keys and values in pages of pools that are allocated once, and who gets which page.

The methods are those of `SlotMemory`. A job has pages for its whole prompt from admission on; sequences get more one by
one. What is computed stays in its pages for prompts that begin with the same tokens, until others need them.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from itertools import product
from math import prod

import mlx.core as mx

from parallm.device.memory import free_memory
from parallm.engine.captured_forward import FEW_ROWS, CapturedForward
from parallm.engine.decode_batch import CompiledForward, row_bucket
from parallm.engine.decoder import Decoder
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.block_pool import BlockPool, BlockTable
from parallm.engine.kv.budget import KvBudget, KvCost, max_context
from parallm.engine.kv.paged_cache import PagedCache, Pool, first_page, grown, make_pools
from parallm.engine.kv.prefix_cache import Owner
from parallm.engine.paged_batch import PagedDecodeBatch, table_widths
from parallm.engine.scheduler import RequestQueue
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.settings import EngineSettings
from parallm.model.kernels.page_write import PAGE
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TrafficClass

SIDE_BY_SIDE = 2
"""Pools grow fast, with old and new ones side by side, if this many times the new ones are free."""


class PagedMemory:
    def __init__(
        self,
        model: SharedModel,
        settings: EngineSettings,
        cost: KvCost,
        queues: Mapping[TrafficClass, RequestQueue],
        is_servable: Callable[[str, int], bool],
    ) -> None:
        """`is_servable`: whether a request can still name an adapter of this name and version."""
        mx.synchronize()  # graphs of an engine before this one, whose memory MLX frees without waiting for them
        gc.collect()  # an engine before this one is part of cycles, and would keep its pools beside the new ones
        mx.clear_cache()
        self._model = model
        self._queues = queues
        self._is_servable = is_servable
        self._uses_cache = settings.prefix_cache
        self._page_bytes = PAGE * cost.per_token
        self._compiled = CompiledForward(model, PagedCache)
        self._captured = CapturedForward(model)
        # a page more than its tokens need, which is the scratch page
        self.budget = KvBudget(settings, cost, lambda num_tokens: (num_pages(num_tokens + 1) + 1) * self._page_bytes)
        # no more than all rows of all classes can fill
        self._max_context = max_context(settings, model)
        self._max_pages = 1 + len(queues) * self.budget.max_rows * num_pages(self._max_context + 1)
        self._allocate_pools()

    def _allocate_pools(self) -> None:
        size = self._page_bytes
        max_pages = max(2, min(self.budget.limit // size, self._max_pages))
        self.prefixes = BlockPool(max_pages, PAGE, size, self._num_awaited)
        self._pools: list[Pool] = []
        self._layers: list[Pool] = []
        self._num_pages = 0  # of the pools

    @property
    def layers(self) -> list[Pool]:
        """Keys and values of each layer as its first page, a view: kernels find all others after it, and a compiled
        step sees the same shape when pools grow."""
        if self._num_pages < self.prefixes.num_pages:
            self._grow_pools(self.prefixes.num_pages)
        return self._layers

    def _grow_pools(self, num_pages: int) -> None:
        # MLX keeps the memory of old pools until it is short: giving it back to CUDA and asking again takes time
        is_short = SIDE_BY_SIDE * num_pages * self._page_bytes > free_memory()
        self._pools = self._pools or make_pools(self._model, 1)
        self._layers = []
        for index, (keys, values) in enumerate(self._pools):
            self._pools[index] = grown(keys, num_pages), grown(values, num_pages)
            del keys, values
            if is_short:  # old and new pools exist of one layer at a time
                mx.eval(self._pools[index])
        self._layers = [(first_page(keys), first_page(values)) for keys, values in self._pools]
        mx.eval(self._pools, self._layers)
        if is_short:
            mx.clear_cache()
        self._num_pages = num_pages

    def make_batch(self) -> PagedDecodeBatch:
        return PagedDecodeBatch(self._model, self.prefixes, lambda: self.layers, self._compiled, self._captured)

    def compilations(self) -> Iterator[int]:
        """Capture a step of the base for one number of rows and width of tables after the other, small ones first, or
        compile it where that cannot be; yields the number of rows. Building a graph of 32 layers takes Python 20 ms."""
        spare = make_pools(self._model, 1)  # until there are others
        widths = table_widths(min(self._max_context, self.budget.limit // self.budget.cost.per_token))
        if self._captured.prepare(FEW_ROWS, widths[0], _arrays(self._layers or spare), None):
            yield FEW_ROWS
        all_rows = sorted({row_bucket(rows) for rows in range(self._captured.min_rows, self.budget.max_rows + 1)})
        for rows, width in sorted(product(all_rows, widths), key=prod):
            pools = _arrays(self._layers or spare)
            if self._captured.prepare(rows, width, pools, None):
                yield rows
                continue
            metadata, lengths_B = AttentionMetadata(), mx.zeros(rows, mx.int32)
            metadata.set_traced(lengths_B, mx.zeros((rows, width), mx.int32), num_positions=width * PAGE)
            try:
                self._compiled(lengths_B, metadata, pools, None)
            except ValueError:  # MLX's, for a model that reads an array while it runs: its steps are not compiled
                return
            yield rows

    def num_held_bytes(self) -> int:
        """Bytes of pages that running sequences and admitted jobs hold now."""
        return self.prefixes.num_used * self._page_bytes

    def lower(self, requests: Ordered[GenerationRequest]) -> bool:
        """Lower the limit after memory ran out, and forget all pages; False if `requests` need more."""
        is_lower = self.budget.lower(requests, self.prefixes.num_pages * self._page_bytes)
        if is_lower:
            mx.synchronize()  # a graph may still read the pools
            self._allocate_pools()
        return is_lower

    def fits(self, job: PrefillJob, decoder: Decoder) -> bool:
        """Whether pages for a job and a page for its first sequence are free."""
        cached = self._cached(job)
        needed = num_pages(len(job.tokens)) + 1 - self.prefixes.num_held(cached)
        return needed <= self.prefixes.num_free

    def allocate(self, job: PrefillJob) -> int:
        """Give a job that fits its pages; returns their bytes."""
        cached, count = self._cached(job), num_pages(len(job.tokens))
        self.prefixes.share(cached)
        pages = self.prefixes.allocate(count - len(cached))
        assert pages is not None, "a job that fits"
        job.table = BlockTable(self.prefixes, [*cached, *pages])
        job.table.num_cached = len(cached)
        return count * self._page_bytes

    def begin(self, job: PrefillJob) -> int:
        """Take what the prefix cache has by now, before the first chunk; returns the number of tokens."""
        assert job.table is not None, "an admitted job"
        cached = self._cached(job)
        if len(cached) > job.table.num_cached:
            job.table.share_first(cached)
        job.num_computed = job.table.num_cached * PAGE
        if self._uses_cache and job.scorer is None:
            self.prefixes.count_lookup(job.num_computed > 0)
        return job.num_computed

    def keep(self, sequence: Sequence, table: BlockTable, num_computed: int) -> None:
        """Let later prompts find the first `num_computed` tokens that a sequence has computed, as far as one version
        has."""
        if not self._uses_cache:
            return
        self.prefixes.forget(self._is_servable)
        end, adapter = sequence.segments()[0]
        tokens = (*sequence.request.prompt_tokens, *sequence.tokens)[: min(end, num_computed)]
        self.prefixes.cache(Owner.of(adapter, sequence.request.cache_salt), tokens, table.pages)

    def resize(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool:
        """Give the sequences of a batch the pages of their next positions; whether they are free, and one for each
        sequence that joins next."""
        batch = decoder.batch
        assert isinstance(batch, PagedDecodeBatch)
        return batch.reserve(len(sequences) - len(batch.sequences))

    def resize_to_grow(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool:
        """The same: pages grow anyway."""
        return self.resize(decoder, sequences)

    def _num_awaited(self) -> int:
        """Pages for prompts that wait for rows that are free, and for the first tokens of their sequences. Completions
        may be much shorter than `max_tokens`, and the learner of a small GPU needs the rest."""
        num_awaited = 0
        for queue in self._queues.values():
            num_rows = self.budget.max_rows - queue.num_running
            for job in queue.waiting:
                if num_rows <= 0:
                    break
                num_rows -= len(job.sequences)
                num_awaited += len(job.sequences) + (0 if job.num_bytes else num_pages(len(job.tokens)))
        return num_awaited

    def _cached(self, job: PrefillJob) -> list[int]:
        """The cached pages that a job begins with. A token is left to compute: it gives the logits."""
        may_switch = job.request.switches_in_flight and job.table is None
        if not self._uses_cache or job.scorer is not None or may_switch:
            return []
        end, adapter = job.segment()
        owner = Owner.of(adapter, job.request.cache_salt)
        return self.prefixes.match(owner, job.tokens, min(end, len(job.tokens) - 1))


def _arrays(layers: Ordered[Pool]) -> list[mx.array]:
    return [array for layer in layers for array in layer]


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)
