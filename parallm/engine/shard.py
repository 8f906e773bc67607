"""Rows that decode in one forward on one lane.

Two kinds behind one interface: `BatchedShard` for models whose rows batch exactly, `RowByRowShard` for the rest
(recurrent states and mlx-lm's other caches), which computes one row after the other with mlx-lm's own caches.

Axes: B rows, H hidden.
"""

import copy
import logging
import operator
from collections.abc import Sequence as Ordered
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from parallm.engine.active_rows import ActiveRows
from parallm.engine.compiled_forward import CompiledForward, row_bucket
from parallm.engine.kv_cache import SlotCache
from parallm.engine.kv_cost import BLOCK, KvCost
from parallm.engine.kv_stack import row_copies
from parallm.engine.layout import EMPTY, Layout, roomy
from parallm.engine.sequence import Sequence
from parallm.engine.views import AdapterViews
from parallm.model.attention import LEAST_ROWS
from parallm.model.cuda import on_cuda
from parallm.model.lora import OneAdapter, View
from parallm.model.row_lora import RowAdapters
from parallm.model.shared_model import SharedModel

Item = TypeVar("Item")
logger = logging.getLogger(__name__)

COMPILED_STEP = 256
"""Positions by which tight pools grow where each of their shapes costs a trace; elsewhere they grow by blocks."""


class Shard(Protocol):
    rows: list[Sequence]
    """Row b of the next forward; changed by `join` and `leave` only."""

    def join(self, sequences: Ordered[Sequence], cache: Ordered[Any], places: Ordered[int]) -> None:
        """Add rows that continue computed prompts: i what row `places[i]` of the cache holds, which is copied."""

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        """Take rows out; the last rows take their places.

        With `waits` it waits for the device, which saves a copy of all keys and values where no step is in flight.
        """

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        """Keys and values of a row's positions, as `kv_stack.row_copies` makes them; not evaluated."""

    @property
    def nbytes(self) -> int:
        """What its rows' keys, values and states take."""

    def bytes_for(self, lengths: Ordered[int], *, tight: bool) -> int:
        """What they would take for rows with so many positions; `tight`: without room for more."""

    def holds(self, lengths: Ordered[int]) -> bool:
        """Whether such rows fit as it is laid out now."""

    def lay_out(self, lengths: Ordered[int], *, tight: bool) -> None:
        """Take that much, with the present rows kept; waits for the device where there is something to copy."""

    @property
    def num_positions(self) -> int:
        """That each row has room for as it is laid out now; 0 where rows cannot feed several tokens in one step."""

    def forward(self, views: AdapterViews, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        """Feed `tokens_B`, the newest of the first `num_rows` rows, int32; hidden states (B, H), not evaluated.

        With `widths`, so many tokens of each row in order: the newest, and what may follow it.
        """


class BatchedShard:
    """All rows in one forward over slot caches."""

    def __init__(self, model: SharedModel, num_layers: int, *, compiles: bool, cost: KvCost) -> None:
        self.rows: list[Sequence] = []
        self._model = model
        self._cost = cost
        self._active = ActiveRows()
        self._caches = [SlotCache(self._active) for _ in range(num_layers)]
        self._compiled = CompiledForward(model) if compiles else None

    def join(self, sequences: Ordered[Sequence], cache: Ordered[Any], places: Ordered[int]) -> None:
        new = slice(len(self.rows), len(self.rows) + len(sequences))
        self._reserve(new.stop, max(one.num_reserved for one in (*sequences, *self.rows)))
        rows = _rows_at(places)
        for slots, prompts in zip(self._caches, cache, strict=True):
            slots.join(new, prompts, rows)
        self.rows += sequences

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        moves = _moves(rows, len(self.rows))
        copies = [[slots.copies(last, 0, self.rows[last].num_cached) for _, last in moves] for slots in self._caches]
        if moves and waits:
            mx.eval(copies)
        for slots, copied in zip(self._caches, copies, strict=True):
            for (row, _), one in zip(moves, copied, strict=True):
                slots.put(row, one)
        _fill(self.rows, moves, len(rows))
        if not self.rows:
            self._release()

    @property
    def num_positions(self) -> int:
        return self._active.layout.num_positions

    def forward(self, views: AdapterViews, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        rows, num_tokens = self.rows[:num_rows], len(tokens_B)
        # slots that decode along: for products of LEAST_ROWS rows, and for few shapes
        is_compiled = self._compiled is not None and not widths
        spare = (row_bucket(num_tokens) if is_compiled else max(num_tokens, LEAST_ROWS)) - num_tokens
        # A row that joins now may hold such a slot: its first token will replace what is written behind its prompt
        joining = self.rows[num_rows : num_rows + spare]
        lengths = [row.num_cached for row in rows] + [row.num_cached + 1 for row in joining]
        lengths += [0] * (spare - len(joining))
        each = [*(widths or [1] * num_rows), *[1] * spare]
        self._reserve(max(len(self.rows), len(each)), max(map(operator.add, lengths, each)))
        adapters = [row.adapter for row, width in zip(rows, each, strict=False) for _ in range(width)]
        computed_B = mx.pad(tokens_B, (0, spare)) if spare else tokens_B
        view = views.for_rows(adapters + [rows[0].adapter] * spare)
        if widths:
            self._active.set_spread(lengths, each)
            return self._model.hidden(computed_B[:, None], self._caches, view)[:num_tokens, 0]
        return self._hidden(computed_B, lengths, view)[:num_tokens]

    def _hidden(self, tokens_B: mx.array, lengths: Ordered[int], view: View | None) -> mx.array:
        if self._compiled and (view is None or isinstance(view, OneAdapter | RowAdapters)):
            pools = [array for slots in self._caches for array in slots.state]
            try:
                hidden_BH, pools = self._compiled(tokens_B, mx.array(lengths, mx.int32), pools, view)
            except ValueError as error:  # MLX's, for a model that reads an array while it runs, such as dbrx
                logger.warning("decoding is not compiled: %s", error)
                self._compiled = None
            else:
                for slots, keys, values in zip(self._caches, pools[::2], pools[1::2], strict=True):
                    slots.state = [keys, values]
                return hidden_BH
        self._active.set_lengths(lengths)
        return self._model.hidden(tokens_B[:, None], self._caches, view)[:, 0]

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        pools = [array for slots in self._caches for array in slots.state]
        return row_copies([pool[row : row + 1, :, start:end] for pool in pools])

    @property
    def nbytes(self) -> int:
        return self._active.layout.area * self._cost.per_token

    def bytes_for(self, lengths: Ordered[int], *, tight: bool) -> int:
        return self._layout(len(lengths), max(lengths, default=0), tight=tight).area * self._cost.per_token

    def holds(self, lengths: Ordered[int]) -> bool:
        return self._active.layout.holds(self._layout(len(lengths), max(lengths, default=0), tight=True))

    def lay_out(self, lengths: Ordered[int], *, tight: bool) -> None:
        self._change(self._layout(len(lengths), max(lengths, default=0), tight=tight))

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        """Room for this much, if nobody has laid it out before."""
        if not self._active.layout.holds(Layout(num_slots, num_positions)):
            self._change(self._layout(num_slots, num_positions, tight=False))

    def _layout(self, num_rows: int, num_positions: int, *, tight: bool) -> Layout:
        if num_rows == 0:
            return EMPTY
        num_slots = row_bucket(num_rows) if self._compiled else max(num_rows, LEAST_ROWS)
        step = COMPILED_STEP if self._compiled else BLOCK
        needed = Layout(num_slots, -(-num_positions // step) * step)
        return needed if tight else roomy(needed, self._active.layout)

    def _change(self, layout: Layout) -> None:
        before, self._active.layout = self._active.layout, layout
        if layout == EMPTY:
            self._release()
        elif layout != before:
            # One layer after the other: so not much more than the pools is ever held
            for slots in self._caches:
                if copied := slots.resize(min(len(self.rows), layout.num_slots)):
                    mx.eval(copied)
            if layout.area < before.area:
                mx.clear_cache()  # or MLX would keep what was given back

    def _release(self) -> None:
        self._active = ActiveRows()
        self._caches = [SlotCache(self._active) for _ in self._caches]


class RowByRowShard:
    """One forward per row."""

    def __init__(self, model: SharedModel, *, cost: KvCost) -> None:
        self.rows: list[Sequence] = []
        self._model = model
        self._cost = cost
        self._caches: list[list[Any]] = []

    def join(self, sequences: Ordered[Sequence], cache: Ordered[Any], places: Ordered[int]) -> None:
        self._caches += [copy.deepcopy(list(cache)) for _ in sequences]
        self.rows += sequences

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        moves = _moves(rows, len(self.rows))
        _fill(self.rows, moves, len(rows))
        _fill(self._caches, moves, len(rows))

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        raise NotImplementedError("states of rows that run one by one cannot be cut")

    @property
    def nbytes(self) -> int:
        return self.bytes_for([row.num_cached + 1 for row in self.rows], tight=True)

    def bytes_for(self, lengths: Ordered[int], *, tight: bool) -> int:
        return sum(map(self._cost.of, lengths))

    def holds(self, lengths: Ordered[int]) -> bool:
        return self.bytes_for(lengths, tight=True) <= self.nbytes

    def lay_out(self, lengths: Ordered[int], *, tight: bool) -> None:
        """mlx-lm's caches grow by themselves."""

    @property
    def num_positions(self) -> int:
        return 0

    def forward(self, views: AdapterViews, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        if widths:
            raise NotImplementedError("states of rows that run one by one cannot be rolled back")
        hidden_rows = [
            self._model.hidden(tokens_B[place : place + 1, None], cache, views.for_rows([row.adapter]))[:, 0]
            for place, (row, cache) in enumerate(zip(self.rows[:num_rows], self._caches, strict=False))
        ]
        return mx.concatenate(hidden_rows, axis=0)


def make_shard(model: SharedModel, cost: KvCost) -> Shard:
    """A shard of the kind that the model allows.

    Only with MLX's CUDA build is a step compiled: on a CPU that needs a C++ compiler and saves little.
    """
    if not model.batches_exactly:
        return RowByRowShard(model, cost=cost)
    return BatchedShard(model, len(model.make_cache()), compiles=on_cuda(), cost=cost)


def _rows_at(places: Ordered[int]) -> slice | mx.array:
    """An index of these rows that copies nothing where it can; of one row where all are the same."""
    first = places[0]
    if all(place == first for place in places):
        return slice(first, first + 1)
    if list(places) == [*range(first, first + len(places))]:
        return slice(first, first + len(places))
    return mx.array(list(places), mx.int32)


def _moves(leaving: Ordered[int], num_rows: int) -> list[tuple[int, int]]:
    """(free place, row from behind) for each row that takes the place of one that leaves."""
    num_left = num_rows - len(leaving)
    gone = frozenset(leaving)
    return list(
        zip(
            sorted(row for row in gone if row < num_left),
            [row for row in range(num_left, num_rows) if row not in gone],
            strict=True,
        )
    )


def _fill(rows: list[Item], moves: Ordered[tuple[int, int]], num_leaving: int) -> None:
    for place, row in moves:
        rows[place] = rows[row]
    del rows[len(rows) - num_leaving :]
