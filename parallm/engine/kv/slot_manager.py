"""Slots of a batch's sequences in the KV buffers: allocation, joins and leaves.

With MLX's CUDA build a kernel takes every row's slot as a number, so a sequence keeps its slot. MLX's own operations
need contiguous slots: the last sequence moves to the slot that another one leaves.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from parallm.engine.kv.attention_metadata import AttentionMetadata, StepIndices
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.prefix_cache import row_copies
from parallm.engine.kv.shapes import EMPTY, BufferShape
from parallm.engine.kv.state_cache import StateCache
from parallm.model.kernels.slot_copy import can_copy, can_copy_out, copy_out, copy_to_slots
from parallm.model.shared_model import PlainCache, leaves, mirrored

Item = TypeVar("Item")


class SlotManager:
    """Keys, values and states of a batch's sequences, in a cache for each layer."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers`: a model's caches for one row."""
        self.metadata = AttentionMetadata()
        self._layers = layers
        if any(isinstance(leaf, ArraysCache) for leaf in leaves(layers)):
            # rows have their states in the order of the batch, and so their slots
            self.metadata.is_contiguous = self.metadata.needs_contiguous = True
        self._set_caches()
        self._slots: list[int] = []  # of each sequence; sequence i has slot i where slots are contiguous
        self._indices = StepIndices()
        self._joining: list[mx.array] = []  # zeros; evaluating them writes joined prompts into the buffers
        self._has_stepped = False  # the first step shows whether MLX's operations read the buffers

    @property
    def shape(self) -> BufferShape:
        return self.metadata.shape

    def _set_caches(self) -> None:
        """Let there be empty caches: `caches` as models take them, and the same in two lists."""
        self.caches = mirrored(self._layers, self._empty)
        self._keys_values: list[SlotCache] = [leaf for leaf in leaves(self.caches) if isinstance(leaf, SlotCache)]
        self._states: list[StateCache] = [leaf for leaf in leaves(self.caches) if isinstance(leaf, StateCache)]

    def _empty(self, layer: Any) -> SlotCache | StateCache:
        return StateCache() if isinstance(layer, ArraysCache) else SlotCache(self.metadata)

    @property
    def num_states(self) -> int:
        """Rows that the states have; 0 without states."""
        return self._states[0].num_rows if self._states else 0

    @property
    def buffers(self) -> list[mx.array]:
        """Keys and values (S, H, L, D) of each layer in turn, then the states."""
        keys_values = [array for layer in self._keys_values for array in layer.state]
        return keys_values + [array for layer in self._states for array in layer.arrays]

    @buffers.setter
    def buffers(self, buffers: Sequence[mx.array]) -> None:
        arrays = iter(buffers)
        for layer in self._keys_values:
            layer.state = [next(arrays) for _ in layer.state]
        for state in self._states:
            state.arrays = [next(arrays) for _ in state.arrays]

    def join(self, cache: Sequence[Any], rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Give slots to new sequences: sequence i gets `lengths[i]` positions of row `rows[i]` of the cache."""
        slots = self._free()[: len(rows)]
        computed = [leaf for leaf in leaves(cache) if isinstance(leaf, PlainCache)]
        for layer, prompts in zip(self._keys_values, computed, strict=True):
            layer.allocate(prompts)
        prompts_N = [array for prompts in computed for array in (prompts.keys, prompts.values)]
        if not self.metadata.is_contiguous and can_copy(prompts_N, self.buffers):
            self._joining.append(copy_to_slots(prompts_N, self.buffers, rows=rows, slots=slots, lengths=lengths))
        else:
            for layer, prompts in zip(self._keys_values, computed, strict=True):
                layer.join(_index(slots), prompts, _index(rows))
        states = [leaf for leaf in leaves(cache) if isinstance(leaf, ArraysCache)]
        for state, prompt in zip(self._states, states, strict=True):
            state.join(len(self._slots), prompt, rows)
        self._slots += slots

    def clear(self, index: int) -> None:
        """Zero a sequence's slot, which holds NaN and becomes another sequence's."""
        for layer in self._keys_values:
            layer.clear(self._slots[index])

    def leave(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int], num_leaving: int, *, waits: bool) -> None:
        """Remove sequences: `moves` are (free index, index from the end) of those that stay, with their lengths.

        With `waits` it waits for copies of what moves, so that the buffers are written in place.
        """
        if not self.metadata.is_contiguous:
            fill(self._slots, moves, num_leaving)
        else:
            self._move(moves, lengths, waits=waits)
            kept = list(range(len(self._slots)))
            fill(kept, moves, num_leaving)
            for state in self._states:
                state.leave(kept)
            del self._slots[len(self._slots) - num_leaving :]
        if not self._slots:
            self._release()

    def begin_step(self, lengths: Sequence[int], query_lengths: Sequence[int] = ()) -> None:
        """Set the metadata for rows of these lengths; rows after the present sequences are free slots.

        With `query_lengths` each slot feeds that many tokens. Once MLX's operations turn out to read the slots, they
        become contiguous for good.
        """
        if self.metadata.needs_contiguous and not self.metadata.is_contiguous:
            self._copy_all()
            self.metadata.is_contiguous = True
        if self._joining and (query_lengths or not self._has_stepped):
            # Operations of MLX may read, which copies buffers at any time: it knows nothing of these writes
            mx.eval(self._joining)
            self._joining = []
        self._has_stepped = True
        slots_S, lengths_S = self._indices.arrays([*self._slots, *self._free()][: len(lengths)], lengths)
        slots_S, self._joining = sum(self._joining, slots_S), []
        if query_lengths:
            self.metadata.set_spans(lengths, query_lengths, slots_S)
        else:
            self.metadata.set_lengths(lengths, lengths_S, slots_S)

    def begin_states(self, num_running: int, num_rows: int) -> None:
        """Prepare the states for a forward of `num_rows`, of which the first `num_running` sequences run."""
        for state in self._states:
            state.begin_step(num_running, len(self._slots), num_rows)

    def end_states(self, num_running: int) -> None:
        """Keep what that forward leaves of the states of those sequences, and the states of others as they were."""
        for state in self._states:
            state.end_step(num_running)

    def copies(self, index: int, start: int, end: int) -> list[mx.array]:
        """Copies of these positions of a sequence; see `row_copies`."""
        slot, buffers = self._slots[index], self.buffers
        if can_copy_out(buffers):
            return [copy_out(buffers, slot, start, end)]
        return row_copies([buffer[slot : slot + 1, :, start:end] for buffer in buffers])

    def resize(self, shape: BufferShape) -> None:
        """Bring the buffers to `shape`, with the present sequences in the first slots."""
        before, self.metadata.shape = self.metadata.shape, shape
        if shape == EMPTY:
            self._release()
        elif shape != before:
            self._copy_all()
            if shape.area < before.area:
                mx.clear_cache()  # or MLX would keep the freed memory

    def _copy_all(self) -> None:
        """Create new buffers, with the sequences in the first slots."""
        if self._joining:
            mx.eval(self._joining)
            self._joining = []
        # One layer after the other, so that old and new buffers exist of one layer at a time
        for layer in self._keys_values:
            if copied := layer.resize(_index(self._slots)):
                mx.eval(copied)
        self._slots = list(range(len(self._slots)))

    def _move(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int], *, waits: bool) -> None:
        copies = [
            [layer.copies(last, 0, length) for (_, last), length in zip(moves, lengths, strict=True)]
            for layer in self._keys_values
        ]
        if moves and waits:
            mx.eval(copies)
        for layer, copied in zip(self._keys_values, copies, strict=True):
            for (free, _), arrays in zip(moves, copied, strict=True):
                layer.put(free, arrays)

    def _free(self) -> list[int]:
        taken = frozenset(self._slots)
        return [slot for slot in range(self.shape.num_slots) if slot not in taken]

    def _release(self) -> None:
        self._slots, self._joining, self.metadata.shape = [], [], EMPTY
        self._set_caches()


def fill(items: list[Item], moves: Sequence[tuple[int, int]], num_leaving: int) -> None:
    """Remove `num_leaving` items, whose indices the last items take."""
    for free, last in moves:
        items[free] = items[last]
    del items[len(items) - num_leaving :]


def _index(numbers: Sequence[int]) -> slice | mx.array:
    """An index of these rows or slots, a slice where possible; of one row where all are the same."""
    first = numbers[0] if numbers else 0
    if all(number == first for number in numbers):
        return slice(first, first + 1)
    if list(numbers) == [*range(first, first + len(numbers))]:
        return slice(first, first + len(numbers))
    return mx.array(list(numbers), mx.int32)
