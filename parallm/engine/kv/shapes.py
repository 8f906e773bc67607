"""Shapes of KV buffers, and the few lengths to which prompts are padded.

With spare memory slots and positions double (`grown`), so a compiled step sees a handful of shapes. Without compiled
steps (`grown_to_end`) positions reach the end of the longest request at once if that is near, and buffers that are
copied anyway keep slots for the present sequences only: a CPU pays most for memory that is written for the first time.
When memory is short, buffers are exactly as large as needed; with compiled steps up to a fifth more, which is four
shapes for each doubling. Positions that are four times what the sequences need are given back.

Prompts are computed at their own length on a CPU, in products of enough rows; those that share forwards in whole
blocks. With MLX's CUDA build lengths come in few sizes: MLX plans cuDNN's attention for each new shape, and keeps 256
plans.
"""

from dataclasses import dataclass

from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda

BLOCK = 16
"""Positions that are accounted, and kept in the prefix cache, together."""
MIN_SLOTS = 8
MIN_POSITIONS = 256
TOO_LONG = 4
NEAR = 1.5
"""If a request's longest length is at most this times the next power of two, it is allocated at once."""
STEP = 128
"""Tokens to a multiple of which prompts are padded with MLX's CUDA build."""


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


def blocks(num_positions: int) -> int:
    return -(-num_positions // BLOCK)


def grown(needed: BufferShape, present: BufferShape) -> BufferShape:
    """The shape to change to from `present` with spare memory; `present` itself where it suffices."""
    if needed.area == 0:
        return EMPTY
    num_slots, num_positions = _doubled(MIN_SLOTS, needed.num_slots), _doubled(MIN_POSITIONS, needed.num_positions)
    if num_positions * TOO_LONG > present.num_positions:
        num_positions = max(num_positions, present.num_positions)
    return BufferShape(max(num_slots, present.num_slots), num_positions)


def grown_to_end(needed: BufferShape, present: BufferShape, end: int) -> BufferShape:
    """`grown` where shapes need not be few; `end`: most positions of the longest sequence, in whole blocks."""
    if present.holds(needed) and grown(needed, present).num_positions >= present.num_positions:
        return present
    fresh = grown(needed, EMPTY)
    if present != EMPTY:  # one copy, and not one for each request that may end a little later than those before
        end = in_quarters(BLOCK, end)
    return BufferShape(fresh.num_slots, end) if needed.num_positions <= end <= NEAR * fresh.num_positions else fresh


def in_quarters(step: int, number: int) -> int:
    """Round up: to multiples of `step` up to four times it, then to four sizes for each doubling."""
    while step * 8 <= number - 1:
        step *= 2
    return -(-number // step) * step


def padded(num_tokens: int) -> int:
    """Positions to compute for a prompt or chunk of `num_tokens`."""
    return in_quarters(STEP, num_tokens) if on_cuda() else max(MIN_ROWS, num_tokens)


def row_positions(num_tokens: int) -> int:
    """Positions to compute for a prompt of `num_tokens` in a forward over several prompts."""
    return padded(num_tokens) if on_cuda() else blocks(num_tokens) * BLOCK


def allocated(num_tokens: int) -> int:
    """Positions of the cache of a prompt that is computed."""
    return in_quarters(STEP, num_tokens) if on_cuda() else num_tokens + MIN_ROWS


def reusable(num_cached: int) -> int:
    """Tokens that a prompt takes of `num_cached` in the prefix cache."""
    return num_cached // STEP * STEP if on_cuda() else num_cached


def _doubled(size: int, number: int) -> int:
    while size < number:
        size *= 2
    return size
