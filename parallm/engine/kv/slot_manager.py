"""Which slot each row of a shard has, and what becomes of the slots when rows join and leave.

A kernel takes every row's slot as a number, so with MLX's CUDA build a row stays where it is: one that leaves costs
nothing on the device, and one that joins a copy of its prompt. MLX's own operations want the rows side by side: for
them the last row moves to where one leaves.
"""

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata, StepIndices
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.cost import KvFormat
from parallm.engine.kv.prefix_cache import row_copies
from parallm.engine.kv.shapes import EMPTY, BufferShape
from parallm.model.kernels.slot_copy import can_copy, can_copy_out, copy_out, copy_to_slots
from parallm.model.shared_model import PlainCache

Item = TypeVar("Item")


class SlotManager:
    """The keys and values of a shard's rows, in a slot cache for each layer."""

    def __init__(self, num_layers: int, kv_format: KvFormat) -> None:
        self.active = AttentionMetadata()
        self.caches = [SlotCache(self.active, kv_format) for _ in range(num_layers)]
        self._format = kv_format
        self._of_rows: list[int] = []  # row b has slot b where rows are read by place
        self._numbers = StepIndices()
        self._joining: list[mx.array] = []  # zeros; evaluating them writes rows that have joined into the pools
        self._has_stepped = False  # by then it is known who reads the pools

    @property
    def layout(self) -> BufferShape:
        return self.active.layout

    @property
    def pools(self) -> list[mx.array]:
        """What the slots of each layer in turn hold: its keys and values (S, H, L, D), or the parts of both."""
        return [array for layer in self.caches for array in layer.state]

    @pools.setter
    def pools(self, pools: Sequence[mx.array]) -> None:
        size = len(pools) // len(self.caches)
        for place, layer in enumerate(self.caches):
            layer.state = list(pools[size * place : size * (place + 1)])

    def join(self, cache: Sequence[PlainCache], places: Sequence[int], lengths: Sequence[int]) -> None:
        """Give a slot to new rows, behind the present ones: row `places[i]` of the cache, of `lengths[i]` positions."""
        new = self._free()[: len(places)]
        for layer, prompts in zip(self.caches, cache, strict=True):
            layer.allocate(prompts)
        prompts_N = [array for prompts in cache for array in (prompts.keys, prompts.values)]
        if not self.active.by_place and can_copy(prompts_N, self.pools):
            self._joining.append(copy_to_slots(prompts_N, self.pools, rows=places, slots=new, lengths=lengths))
        else:
            for layer, prompts in zip(self.caches, cache, strict=True):
                layer.join(_index(new), prompts, _index(places))
        self._of_rows += new

    def clear(self, row: int) -> None:
        """Forget what a row has written: its numbers are not finite, and its slot becomes another row's."""
        for layer in self.caches:
            layer.clear(self._of_rows[row])

    def leave(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int], num_leaving: int, *, waits: bool) -> None:
        """Take so many rows out: `moves` are the (free place, row from behind) of those that stay, and their lengths.

        With `waits` it waits for copies of what moves, so that the pools are written in place.
        """
        if not self.active.by_place:
            fill(self._of_rows, moves, num_leaving)
        else:
            self._move(moves, lengths, waits=waits)
            del self._of_rows[len(self._of_rows) - num_leaving :]
        if not self._of_rows:
            self._release()

    def begin_step(self, lengths: Sequence[int], widths: Sequence[int] = ()) -> None:
        """The coming step computes rows of `lengths` positions; those behind the present ones are free slots.

        With `widths`, so many tokens of each.

        Where MLX's operations turn out to read them, the rows go side by side, once and for all.
        """
        if self.active.needs_places and not self.active.by_place:
            self._copy_all()
            self.active.by_place = True
        if self._joining and (widths or not self._has_stepped):
            # Operations of MLX may read, which copies pools whenever it likes: it knows nothing of these writes
            mx.eval(self._joining)
            self._joining = []
        self._has_stepped = True
        slots_S, lengths_S = self._numbers.arrays([*self._of_rows, *self._free()][: len(lengths)], lengths)
        slots_S, self._joining = sum(self._joining, slots_S), []
        if widths:
            self.active.set_spread(lengths, widths, slots_S)
        else:
            self.active.set_lengths(lengths, lengths_S, slots_S)

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        """Of these positions of a row; see `row_copies`."""
        slot, pools = self._of_rows[row], self.pools
        if can_copy_out(pools):
            return [copy_out(pools, slot, start, end)]
        parts = [[pool[slot : slot + 1, :, start:end] for pool in layer.state] for layer in self.caches]
        return row_copies([array for layer in parts for array in self._format.unpack(layer)])

    def lay_out(self, layout: BufferShape) -> None:
        """Bring the pools to `layout`, with the present rows in the first slots."""
        before, self.active.layout = self.active.layout, layout
        if layout == EMPTY:
            self._release()
        elif layout != before:
            self._copy_all()
            if layout.area < before.area:
                mx.clear_cache()  # or MLX would keep what was given back

    def _copy_all(self) -> None:
        """Make new pools, with the rows in the first slots."""
        if self._joining:
            mx.eval(self._joining)
            self._joining = []
        # One layer after the other: so not much more than the pools is ever held
        for layer in self.caches:
            if copied := layer.resize(_index(self._of_rows)):
                mx.eval(copied)
        self._of_rows = list(range(len(self._of_rows)))

    def _move(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int], *, waits: bool) -> None:
        copies = [
            [layer.copies(last, 0, length) for (_, last), length in zip(moves, lengths, strict=True)]
            for layer in self.caches
        ]
        if moves and waits:
            mx.eval(copies)
        for layer, copied in zip(self.caches, copies, strict=True):
            for (place, _), one in zip(moves, copied, strict=True):
                layer.put(place, one)

    def _free(self) -> list[int]:
        taken = frozenset(self._of_rows)
        return [slot for slot in range(self.layout.num_slots) if slot not in taken]

    def _release(self) -> None:
        self._of_rows, self._joining, self.active.layout = [], [], EMPTY
        self.caches = [SlotCache(self.active, self._format) for _ in self.caches]


def fill(rows: list[Item], moves: Sequence[tuple[int, int]], num_leaving: int) -> None:
    """Let those from behind take the places of `num_leaving` that leave."""
    for place, row in moves:
        rows[place] = rows[row]
    del rows[len(rows) - num_leaving :]


def _index(places: Sequence[int]) -> slice | mx.array:
    """An index of these rows or slots that copies nothing where it can; of one where all are the same."""
    first = places[0] if places else 0
    if all(place == first for place in places):
        return slice(first, first + 1)
    if list(places) == [*range(first, first + len(places))]:
        return slice(first, first + len(places))
    return mx.array(list(places), mx.int32)
