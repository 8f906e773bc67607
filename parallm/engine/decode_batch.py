"""Rows that decode in one forward on one lane.

Two kinds behind one interface: `SlotDecodeBatch` for models whose rows batch exactly, `SequentialDecodeBatch` for the rest
(recurrent states and mlx-lm's other caches), which computes one row after the other with mlx-lm's own caches.

Axes: B rows, H hidden.
"""

import copy
import logging
import operator
from collections.abc import Sequence as Ordered
from typing import Any, Protocol

import mlx.core as mx

from parallm.engine.compiled_forward import CompiledForward, row_bucket
from parallm.engine.kv.cost import BLOCK, KvCost, KvFormat, blocks, bytes_of_position
from parallm.engine.kv.shapes import EMPTY, MIN_POSITIONS, BufferShape, fitting, in_quarters, roomy
from parallm.engine.kv.slot_manager import SlotManager, fill
from parallm.engine.sequence import Sequence
from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import LoraSelector
from parallm.model.lora.single import SingleLora
from parallm.model.shared_model import SharedModel

logger = logging.getLogger(__name__)


class DecodeBatch(Protocol):
    rows: list[Sequence]
    """Row b of the next forward; changed by `join` and `leave` only."""

    def join(self, sequences: Ordered[Sequence], cache: Ordered[Any], places: Ordered[int]) -> None:
        """Add rows that continue computed prompts: i what row `places[i]` of the cache holds, which is copied."""

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        """Take rows out; the last rows take their places.

        With `waits` it may wait for the device, which saves a copy of all keys and values where no step is in flight.
        """

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        """Keys and values of a row's positions, as `kv_stack.row_copies` makes them; not evaluated."""

    @property
    def nbytes(self) -> int:
        """What its rows' keys, values and states take."""

    def bytes_for(self, lengths: Ordered[int], *, end: int | None) -> int:
        """What they would take for rows with so many positions and room for more; None: without room for more.

        `end` is how many the longest may come to need.
        """

    def holds(self, lengths: Ordered[int]) -> bool:
        """Whether such rows fit as it is laid out now."""

    def lay_out(self, lengths: Ordered[int], *, end: int | None) -> None:
        """Take that much, with the present rows kept; waits for the device where there is something to copy."""

    @property
    def num_positions(self) -> int:
        """That each row has room for as it is laid out now; 0 where rows cannot feed several tokens in one step."""

    def forward(self, loras: LoraSelector, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        """Feed `tokens_B`, the newest of the first `num_rows` rows, int32; hidden states (B, H), not evaluated.

        With `widths`, so many tokens of each row in order: the newest, and what may follow it.
        """


class SlotDecodeBatch:
    """All rows in one forward over slot caches."""

    def __init__(
        self,
        model: SharedModel,
        num_layers: int,
        *,
        compiled: CompiledForward | None,
        kv_format: KvFormat,
        bytes_of_position: int,
    ) -> None:
        self.rows: list[Sequence] = []
        self._model = model
        self._bytes_of_position = bytes_of_position
        self._slots = SlotManager(num_layers, kv_format)
        self._compiled = compiled

    def join(self, sequences: Ordered[Sequence], cache: Ordered[Any], places: Ordered[int]) -> None:
        num_rows = len(self.rows) + len(sequences)
        self._reserve(num_rows, max(one.num_reserved for one in (*sequences, *self.rows)))
        self._slots.join(cache, places, [one.num_cached + 1 for one in sequences])
        self.rows += sequences

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        for row in rows:
            if self.rows[row].may_be_broken:
                self._slots.clear(row)
        moves = _moves(rows, len(self.rows))
        self._slots.leave(moves, [self.rows[row].num_cached for _, row in moves], len(rows), waits=waits)
        fill(self.rows, moves, len(rows))

    @property
    def num_positions(self) -> int:
        return self._slots.layout.num_positions

    def forward(self, loras: LoraSelector, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        rows, num_tokens = self.rows[:num_rows], len(tokens_B)
        # slots that decode along: for products of LEAST_ROWS rows, and for few shapes
        is_compiled = self._compiled is not None and not widths
        spare = (row_bucket(num_tokens) if is_compiled else max(num_tokens, MIN_ROWS)) - num_tokens
        # A row that joins now may hold such a slot: its first token will replace what is written behind its prompt
        joining = self.rows[num_rows : num_rows + spare]
        lengths = [row.num_cached for row in rows] + [row.num_cached + 1 for row in joining]
        lengths += [0] * (spare - len(joining))
        each = [*(widths or [1] * num_rows), *[1] * spare]
        self._reserve(max(len(self.rows), len(each)), max(map(operator.add, lengths, each)))
        self._slots.begin_step(lengths, each if widths else ())
        adapters = [row.adapter for row, width in zip(rows, each, strict=False) for _ in range(width)]
        computed_B = mx.pad(tokens_B, (0, spare)) if spare else tokens_B
        lora = loras.select(adapters + [rows[0].adapter] * spare)
        if widths:
            return self._model.hidden(computed_B[:, None], self._slots.caches, lora)[:num_tokens, 0]
        return self._hidden(computed_B, lora)[:num_tokens]

    def _hidden(self, tokens_B: mx.array, lora: LoraBinding | None) -> mx.array:
        if self._compiled and (lora is None or isinstance(lora, SingleLora | SegmentedLora)):
            try:
                hidden_BH, pools = self._compiled(tokens_B, self._slots.active, self._slots.pools, lora)
            except ValueError as error:  # MLX's, for a model that reads an array while it runs, such as dbrx
                logger.warning("decoding is not compiled: %s", error)
                self._compiled = None
            else:
                self._slots.pools = pools
                return hidden_BH
        return self._model.hidden(tokens_B[:, None], self._slots.caches, lora)[:, 0]

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        return self._slots.copies(row, start, end)

    @property
    def nbytes(self) -> int:
        return self._slots.layout.area * self._bytes_of_position

    def bytes_for(self, lengths: Ordered[int], *, end: int | None) -> int:
        return self._layout(len(lengths), max(lengths, default=0), end).area * self._bytes_of_position

    def holds(self, lengths: Ordered[int]) -> bool:
        return self._slots.layout.holds(self._layout(len(lengths), max(lengths, default=0), None))

    def lay_out(self, lengths: Ordered[int], *, end: int | None) -> None:
        self._slots.lay_out(self._layout(len(lengths), max(lengths, default=0), end))

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        """Room for this much, if nobody has laid it out before."""
        if not self._slots.layout.holds(BufferShape(num_slots, num_positions)):
            self._slots.lay_out(self._layout(num_slots, num_positions, end=0))  # as if it were not known

    def _layout(self, num_rows: int, num_positions: int, end: int | None) -> BufferShape:
        if num_rows == 0:
            return EMPTY
        if self._compiled:
            needed = BufferShape(row_bucket(num_rows), in_quarters(MIN_POSITIONS, num_positions))
            return needed if end is None else roomy(needed, self._slots.layout)
        needed = BufferShape(max(num_rows, MIN_ROWS), blocks(num_positions) * BLOCK)
        return needed if end is None else fitting(needed, self._slots.layout, blocks(end) * BLOCK)


class SequentialDecodeBatch:
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
        fill(self.rows, moves, len(rows))
        fill(self._caches, moves, len(rows))

    def copies(self, row: int, start: int, end: int) -> list[mx.array]:
        raise NotImplementedError("states of rows that run one by one cannot be cut")

    @property
    def nbytes(self) -> int:
        return self.bytes_for([row.num_cached + 1 for row in self.rows], end=None)

    def bytes_for(self, lengths: Ordered[int], *, end: int | None) -> int:
        return sum(map(self._cost.of, lengths))

    def holds(self, lengths: Ordered[int]) -> bool:
        return self.bytes_for(lengths, end=None) <= self.nbytes

    def lay_out(self, lengths: Ordered[int], *, end: int | None) -> None:
        """mlx-lm's caches grow by themselves."""

    @property
    def num_positions(self) -> int:
        return 0

    def forward(self, loras: LoraSelector, num_rows: int, tokens_B: mx.array, widths: Ordered[int] = ()) -> mx.array:
        if widths:
            raise NotImplementedError("states of rows that run one by one cannot be rolled back")
        hidden_rows = [
            self._model.hidden(tokens_B[place : place + 1, None], cache, loras.select([row.adapter]))[:, 0]
            for place, (row, cache) in enumerate(zip(self.rows[:num_rows], self._caches, strict=False))
        ]
        return mx.concatenate(hidden_rows, axis=0)


class DecodeBatchFactory:
    """Makes shards of the kind that the model allows, which share what is compiled.

    Only with MLX's CUDA build is a step compiled: on a CPU that needs a C++ compiler and saves little.
    """

    def __init__(self, model: SharedModel, cost: KvCost, kv_format: KvFormat) -> None:
        self._model = model
        self._cost = cost
        self._format = kv_format
        self._bytes_of_position = bytes_of_position(model, kv_format) if model.is_batch_invariant else 0
        self._compiled = CompiledForward(model) if model.is_batch_invariant and on_cuda() else None

    def __call__(self) -> DecodeBatch:
        if not self._model.is_batch_invariant:
            return SequentialDecodeBatch(self._model, cost=self._cost)
        return SlotDecodeBatch(
            self._model,
            len(self._model.make_cache()),
            compiled=self._compiled,
            kv_format=self._format,
            bytes_of_position=self._bytes_of_position,
        )


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
