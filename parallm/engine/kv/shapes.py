"""How many slots of how many positions a shard's pools have: a rectangle that changes in few steps.

Roomy, both sides double, so a row of any length costs a handful of copies in its life, and a compiled step sees a
handful of shapes. Where no step is compiled (`fitting`), positions go as far as the rows may come to need, if that is
near, and pools that are copied anyway have slots for the present rows only: memory that is written for the first time
costs a CPU more than anything else here. Tight, for when memory is short, both are what the rows need now; where steps
are compiled, a fifth more at most, so that four shapes are seen where doubling sees one. Positions that one long row
needed are given back when they are four times what the others need.
"""

from dataclasses import dataclass

from parallm.engine.kv.cost import BLOCK
from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda

MIN_SLOTS = 8
MIN_POSITIONS = 256
TOO_LONG = 4
NEAR = 1.5
"""Positions that are all that rows may need are taken at once if they are no more than so many times the doubled."""


@dataclass(frozen=True, slots=True)
class BufferShape:
    num_slots: int
    num_positions: int

    @property
    def area(self) -> int:
        return self.num_slots * self.num_positions

    def holds(self, other: "BufferShape") -> bool:
        return self.num_slots >= other.num_slots and self.num_positions >= other.num_positions


EMPTY = BufferShape(0, 0)


def roomy(needed: BufferShape, present: BufferShape) -> BufferShape:
    """The layout to change to from `present` where there is memory; `present` itself where it does."""
    if needed.area == 0:
        return EMPTY
    wanted = BufferShape(_doubled(MIN_SLOTS, needed.num_slots), _doubled(MIN_POSITIONS, needed.num_positions))
    num_positions = max(wanted.num_positions, present.num_positions)
    if wanted.num_positions * TOO_LONG <= present.num_positions:
        num_positions = wanted.num_positions
    return BufferShape(max(wanted.num_slots, present.num_slots), num_positions)


def fitting(needed: BufferShape, present: BufferShape, end: int) -> BufferShape:
    """`roomy` where shapes need not be few; `end`: positions that the longest row may come to need, in whole blocks."""
    wanted = roomy(needed, present)
    if present.holds(needed) and wanted.num_positions >= present.num_positions:
        return present
    fresh = roomy(needed, EMPTY)
    if present != EMPTY:  # one copy, and not one for each row that may end a little later than those before
        end = in_quarters(BLOCK, end)
    return BufferShape(fresh.num_slots, end) if needed.num_positions <= end <= NEAR * fresh.num_positions else fresh


def in_quarters(least: int, number: int) -> int:
    """The next of so many: multiples of `least` up to four times it, then four steps for each doubling."""
    step = least
    while step * 8 <= number - 1:
        step *= 2
    return -(-number // step) * step


def _doubled(least: int, number: int) -> int:
    while least < number:
        least *= 2
    return least


STEP = 128


def padded(num_tokens: int) -> int:
    """Positions that are computed: on CUDA multiples of 128, and beyond 1,024 four sizes for each doubling."""
    return in_quarters(STEP, num_tokens) if on_cuda() else max(MIN_ROWS, num_tokens)


def allocated(num_tokens: int) -> int:
    """Positions of the keys and values of a prompt that is computed."""
    return in_quarters(STEP, num_tokens) if on_cuda() else num_tokens + MIN_ROWS


def reusable(num_known: int) -> int:
    """Of so many tokens that are known from before, those behind which the rest is computed."""
    return num_known // STEP * STEP if on_cuda() else num_known
