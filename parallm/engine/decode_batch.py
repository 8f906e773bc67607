"""Sequences of one stream that decode in one forward, with their keys and values.

`SlotDecodeBatch` serves models that are batch-invariant over slot caches, and those whose states can share a step
(`state_trial.py`); `SequentialDecodeBatch` the others: it computes one sequence after the other with their own caches.

With MLX's CUDA build a step's forward goes through `mx.compile`, as Python takes longer to build its graph than a GPU
to compute it. What differs from step to step comes in as arrays; MLX keeps a trace for each number of rows
(`row_bucket`), shape of the buffers and structure of the LoRA.

Axes: B rows, H hidden.
"""

import copy
import logging
import operator
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.budget import KvCost
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.paged_cache import PagedCache
from parallm.engine.kv.shapes import BLOCK, EMPTY, MIN_POSITIONS, BufferShape, blocks, grown, grown_to_end, in_quarters
from parallm.engine.kv.slot_manager import SlotManager, fill
from parallm.engine.kv.state_cache import StateCache
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.state_trial import shares_steps
from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import SegmentedLora, SegmentedStructure
from parallm.model.lora.selector import LoraSelector
from parallm.model.lora.single import SingleLora, SingleStructure
from parallm.model.shared_model import SharedModel, leaves, mirrored

logger = logging.getLogger(__name__)

Structure = SingleStructure | SegmentedStructure
Arrays = list[mx.array]
Function = Callable[[mx.array, mx.array, mx.array, Arrays, Arrays], tuple[mx.array, Arrays]]


def row_bucket(num_rows: int) -> int:
    """The number of rows that are computed for `num_rows`: at most half as many more from 17 on. A single row is
    computed alone, by a kernel for vectors that costs the host a quarter of a matrix product, unless its step is
    captured."""
    if num_rows <= 1:
        return num_rows
    step = next((step for most, step in ((8, 4), (32, 8), (64, 16), (256, 32)) if num_rows <= most), 64)
    return -(-num_rows // step) * step


class CompiledForward:
    """The trunk of a model over slots or pages, for rows whose adapters come as arrays alone."""

    def __init__(self, model: SharedModel, layer_cache: type[SlotCache] | type[PagedCache] = SlotCache) -> None:
        mx.eval(model.base.parameters())  # a trace would repeat the computation of an array that is not evaluated yet
        self._model = model
        self._layer_cache = layer_cache
        self._layers = model.make_cache()
        num_states = sum(len(leaf.cache) for leaf in leaves(self._layers) if isinstance(leaf, ArraysCache))
        self._num_states = num_states
        self._functions: dict[tuple[Structure | None, bool], Function] = {}
        self._needs_contiguous = False  # as a trace has found for all rows, see `AttentionMetadata`
        self._lora: SingleLora | SegmentedLora | None = None  # the last one, with its arrays and structure
        self._arrays: Arrays = []
        self._structure: Structure | None = None

    def __call__(
        self, tokens_B: mx.array, metadata: AttentionMetadata, buffers: Arrays, lora: SingleLora | SegmentedLora | None
    ) -> tuple[mx.array, Arrays]:
        """Hidden states (B, H), and the buffers after the step: keys and values (S, heads, L, D) of each layer in turn,
        but for pages, which are written in place, then states."""
        if lora is not self._lora:
            self._lora = lora
            self._arrays, self._structure = ([], None) if lora is None else (lora.arrays(), lora.structure())
        key = self._structure, metadata.is_contiguous
        if key not in self._functions:
            self._functions[key] = self._compile(*key)
        function = self._functions[key]
        hidden_BH, buffers = function(tokens_B, metadata.lengths_B, metadata.slots_B, buffers, self._arrays)
        metadata.needs_contiguous = metadata.needs_contiguous or self._needs_contiguous
        return hidden_BH, buffers

    def _compile(self, structure: Structure | None, is_contiguous: bool) -> Function:

        def forward(
            tokens_B: mx.array, lengths_B: mx.array, slots_B: mx.array, buffers: Arrays, weights: Arrays
        ) -> tuple[mx.array, Arrays]:
            traced = AttentionMetadata()
            traced.is_contiguous = traced.needs_contiguous = is_contiguous
            num_positions = self._layer_cache.num_positions(slots_B, buffers) if len(buffers) > self._num_states else 1
            traced.set_traced(lengths_B, slots_B, num_positions=num_positions)
            caches = self._caches(traced, buffers)
            lora = None if structure is None else structure.lora(weights)
            hidden_B1H = self._model.hidden(tokens_B[:, None], caches, lora)
            self._needs_contiguous = self._needs_contiguous or traced.needs_contiguous
            states = [array for leaf in leaves(caches) if isinstance(leaf, StateCache) for array in leaf.arrays]
            keys_values = [leaf for leaf in leaves(caches) if not isinstance(leaf, StateCache)]
            return hidden_B1H[:, 0], [array for leaf in keys_values for array in leaf.state] + states

        compiled: Function = mx.compile(forward)
        return compiled

    def _caches(self, metadata: AttentionMetadata, buffers: Arrays) -> list[Any]:
        """Caches of all layers, in the order of `SlotManager.buffers`."""
        keys_values, states = (iter(part) for part in _cut(buffers, len(buffers) - self._num_states))

        def filled(layer: Any) -> SlotCache | PagedCache | StateCache:
            if isinstance(layer, ArraysCache):
                return StateCache([next(states) for _ in layer.cache])
            return self._layer_cache(metadata, [next(keys_values), next(keys_values)])

        return mirrored(self._layers, filled)


class SlotDecodeBatch:
    """One forward for all sequences over slot caches."""

    def __init__(self, model: SharedModel, cost: KvCost, *, compiled: CompiledForward | None) -> None:
        self.sequences: list[Sequence] = []
        """Row b of the next forward is sequence b; only `join` and `leave` change it."""
        self._model = model
        self._cost = cost
        self._slots = SlotManager(model.make_cache())
        self._compiled = compiled

    def join(self, joining: Ordered[tuple[PrefillJob, Sequence]]) -> None:
        """Add sequences of computed jobs, each with a copy of its job's keys and values."""
        for _, group in groupby(joining, key=lambda pair: id(pair[0].cache)):
            jobs, sequences = zip(*group, strict=True)
            num_sequences = len(self.sequences) + len(sequences)
            self._reserve(num_sequences, max(sequence.num_reserved for sequence in (*sequences, *self.sequences)))
            lengths = [sequence.num_cached + 1 for sequence in sequences]
            self._slots.join(jobs[0].cache, [job.cache_row for job in jobs], lengths)
            self.sequences += sequences

    def leave(self, indices: Ordered[int], *, waits: bool) -> None:
        """Remove sequences; the last ones take their indices.

        With `waits` it may wait for the device, which saves a copy of all keys and values while no step is in flight.
        """
        for index in indices:
            if self.sequences[index].may_be_broken:
                self._slots.clear(index)
        moves = moves_of(indices, len(self.sequences))
        lengths = [self.sequences[index].num_cached for _, index in moves]
        self._slots.leave(moves, lengths, len(indices), waits=waits)
        fill(self.sequences, moves, len(indices))

    @property
    def num_positions(self) -> int:
        """Positions of each slot; 0 where a step cannot feed several tokens of a sequence."""
        return self._slots.shape.num_positions

    def forward(
        self, loras: LoraSelector, num_running: int, tokens_B: mx.array, query_lengths: Ordered[int] = ()
    ) -> mx.array:
        """Feed `tokens_B`, the newest of the first sequences, int32; hidden states (B, H), not evaluated.

        With `query_lengths`, that many tokens of each sequence in order: the newest, and its drafts.
        """
        running, num_tokens = self.sequences[:num_running], len(tokens_B)
        # filler rows, for products of MIN_ROWS rows and for few compiled shapes
        is_compiled = self._compiled is not None and not query_lengths
        num_fillers = (row_bucket(num_tokens) if is_compiled else max(num_tokens, MIN_ROWS)) - num_tokens
        # A sequence that joins now may hold a filler's slot: its first token replaces what is written after its prompt
        joining = self.sequences[num_running : num_running + num_fillers]
        lengths = [sequence.num_cached for sequence in running] + [sequence.num_cached + 1 for sequence in joining]
        lengths += [0] * (num_fillers - len(joining))
        fed = [*(query_lengths or [1] * num_running), *[1] * num_fillers]
        self._reserve(max(len(self.sequences), len(fed)), max(map(operator.add, lengths, fed)))
        self._slots.begin_step(lengths, fed if query_lengths else ())
        self._slots.begin_states(num_running, len(fed))
        adapters = [sequence.adapter for sequence, length in zip(running, fed, strict=False) for _ in range(length)]
        padded_B = mx.pad(tokens_B, (0, num_fillers)) if num_fillers else tokens_B
        lora = loras.select(adapters + [running[0].adapter] * num_fillers)
        if query_lengths:
            return self._model.hidden(padded_B[:, None], self._slots.caches, lora)[:num_tokens, 0]
        hidden_BH = self._hidden(padded_B, lora)[:num_tokens]
        self._slots.end_states(num_running)
        return hidden_BH

    def _hidden(self, tokens_B: mx.array, lora: LoraBinding | None) -> mx.array:
        if self._compiled and (lora is None or isinstance(lora, SingleLora | SegmentedLora)):
            try:
                hidden_BH, buffers = self._compiled(tokens_B, self._slots.metadata, self._slots.buffers, lora)
            except ValueError as error:  # MLX's, for a model that reads an array while it runs, such as dbrx
                logger.warning("decoding is not compiled: %s", error)
                self._compiled = None
            else:
                self._slots.buffers = buffers
                return hidden_BH
        return self._model.hidden(tokens_B[:, None], self._slots.caches, lora)[:, 0]

    def copies(self, index: int, start: int, end: int) -> list[mx.array]:
        """Keys and values of a sequence's positions, in the form of `prefix_cache.row_copies`; not evaluated."""
        return self._slots.copies(index, start, end)

    @property
    def nbytes(self) -> int:
        """Bytes of its keys, values and states."""
        num_rows = max(self._slots.num_states, self._num_state_rows(len(self.sequences)))
        return self._bytes_of(self._slots.shape, num_rows)

    def bytes_for(self, lengths: Ordered[int], *, end: int | None) -> int:
        """Bytes for sequences of these lengths; `end`: most positions of the longest, to grow with; None: no growth."""
        shape = self._shape(len(lengths), max(lengths, default=0), end)
        return self._bytes_of(shape, self._num_state_rows(len(lengths)))

    def holds(self, lengths: Ordered[int]) -> bool:
        """Whether such sequences fit without a resize."""
        return self._slots.shape.holds(self._shape(len(lengths), max(lengths, default=0), None))

    def resize(self, lengths: Ordered[int], *, end: int | None) -> None:
        """Allocate `bytes_for` the same and keep the present sequences; waits for the device if anything is copied."""
        self._slots.resize(self._shape(len(lengths), max(lengths, default=0), end))

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        """Allocate this much where the scheduler has not resized before."""
        if not self._slots.shape.holds(BufferShape(num_slots, num_positions)):
            self._slots.resize(self._shape(num_slots, num_positions, end=0))

    def _bytes_of(self, shape: BufferShape, num_state_rows: int) -> int:
        return shape.area * self._cost.per_token + num_state_rows * self._cost.per_sequence

    def _num_state_rows(self, num_sequences: int) -> int:
        """Rows that states have for this many sequences: as many as their forward."""
        if num_sequences == 0 or self._cost.per_sequence == 0:
            return 0
        return row_bucket(num_sequences) if self._compiled else max(num_sequences, MIN_ROWS)

    def _shape(self, num_sequences: int, num_positions: int, end: int | None) -> BufferShape:
        if num_sequences == 0:
            return EMPTY
        if self._compiled:
            needed = BufferShape(row_bucket(num_sequences), in_quarters(MIN_POSITIONS, num_positions))
            return needed if end is None else grown(needed, self._slots.shape)
        needed = BufferShape(max(num_sequences, MIN_ROWS), blocks(num_positions) * BLOCK)
        return needed if end is None else grown_to_end(needed, self._slots.shape, blocks(end) * BLOCK)


class SequentialDecodeBatch:
    """One forward per sequence; the methods are those of `SlotDecodeBatch`."""

    num_positions = 0

    def __init__(self, model: SharedModel, cost: KvCost) -> None:
        self.sequences: list[Sequence] = []
        self._model = model
        self._cost = cost
        self._caches: list[list[Any]] = []

    def join(self, joining: Ordered[tuple[PrefillJob, Sequence]]) -> None:
        self._caches += [copy.deepcopy(list(job.cache)) for job, _ in joining]
        self.sequences += [sequence for _, sequence in joining]

    def leave(self, indices: Ordered[int], *, waits: bool) -> None:
        moves = moves_of(indices, len(self.sequences))
        fill(self.sequences, moves, len(indices))
        fill(self._caches, moves, len(indices))

    def forward(
        self, loras: LoraSelector, num_running: int, tokens_B: mx.array, query_lengths: Ordered[int] = ()
    ) -> mx.array:
        if query_lengths:
            raise NotImplementedError("states of sequences that run one by one cannot be rolled back")
        hidden = [
            self._model.hidden(tokens_B[row : row + 1, None], cache, loras.select([sequence.adapter]))[:, 0]
            for row, (sequence, cache) in enumerate(zip(self.sequences[:num_running], self._caches, strict=False))
        ]
        return mx.concatenate(hidden, axis=0)

    def copies(self, index: int, start: int, end: int) -> list[mx.array]:
        raise NotImplementedError("states of sequences that run one by one cannot be cut")

    @property
    def nbytes(self) -> int:
        return self.bytes_for([sequence.num_cached + 1 for sequence in self.sequences], end=None)

    def bytes_for(self, lengths: Ordered[int], *, end: int | None) -> int:
        return sum(map(self._cost.of, lengths))

    def holds(self, lengths: Ordered[int]) -> bool:
        return self.bytes_for(lengths, end=None) <= self.nbytes

    def resize(self, lengths: Ordered[int], *, end: int | None) -> None:
        """mlx-lm's caches grow by themselves."""


class DecodeBatchFactory:
    """Creates batches of the kind that the model allows, which share what is compiled: on a CPU that would need a C++
    compiler and save little."""

    def __init__(self, model: SharedModel, cost: KvCost) -> None:
        self._model = model
        self._cost = cost
        self.is_batched = model.is_batch_invariant or shares_steps(model)
        """Whether sequences share a forward."""
        self._compiled = CompiledForward(model) if self.is_batched and on_cuda() else None

    def __call__(self) -> SlotDecodeBatch | SequentialDecodeBatch:
        if not self.is_batched:
            return SequentialDecodeBatch(self._model, self._cost)
        return SlotDecodeBatch(self._model, self._cost, compiled=self._compiled)


def _cut(arrays: Arrays, at: int) -> tuple[Arrays, Arrays]:
    return arrays[:at], arrays[at:]


def moves_of(leaving: Ordered[int], num_sequences: int) -> list[tuple[int, int]]:
    """(free index, index from the end) for each sequence that takes the index of one that leaves."""
    num_left, gone = num_sequences - len(leaving), frozenset(leaving)
    free = sorted(index for index in gone if index < num_left)
    return list(zip(free, [index for index in range(num_left, num_sequences) if index not in gone], strict=True))
