"""Sequences of one stream that decode in one forward, with their keys and values in pages.

A sequence holds a table of pages. It shares the full pages of its prompt with the other completions of its request, and
with whatever else begins with the same tokens; where the prompt's last page is not full, all but the first sequence
copy it. Rows that fill a bucket have no pages: they write to the scratch page.

Axes: B rows, H hidden, N pages of a table.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ordered

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.engine.captured_forward import CapturedForward
from parallm.engine.decode_batch import CompiledForward, moves_of, row_bucket
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.block_pool import SCRATCH, BlockPool, BlockTable
from parallm.engine.kv.paged_cache import PagedCache, Pool
from parallm.engine.kv.slot_manager import fill
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, uploaded
from parallm.model.kernels.page_copy import copy_pages
from parallm.model.kernels.page_write import PAGE
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import LoraSelector
from parallm.model.lora.single import SingleLora
from parallm.model.shared_model import SharedModel

MIN_TABLE = 4
"""Pages of the shortest table that a step is compiled for."""
AHEAD = 32
"""Positions for which rows get a page early when any row needs one, so that tables change in few steps."""

logger = logging.getLogger(__name__)


class PagedDecodeBatch:
    """The methods are those of `SlotDecodeBatch`."""

    num_positions = 0

    def __init__(
        self,
        model: SharedModel,
        pool: BlockPool,
        layers: Callable[[], Ordered[Pool]],
        compiled: CompiledForward | None,
        captured: CapturedForward,
    ) -> None:
        """`layers` gives the pools, with all pages that were allocated."""
        self.sequences: list[Sequence] = []
        """Row b of the next forward is sequence b; only `join` and `leave` change it."""
        self.tables: list[BlockTable] = []
        """Pages of each sequence."""
        self._model = model
        self._pool = pool
        self._layers = layers
        self._compiled = compiled
        self._captured = captured
        self._may_be_captured = True  # by the LoRA of the last step
        self._metadata = AttentionMetadata()
        self._indices = TableIndices()
        self._num_steps = 0
        self._due = 0  # the step before which a row needs another page

    def join(self, joining: Ordered[tuple[PrefillJob, Sequence]]) -> None:
        """Add sequences of computed jobs. `reserve` has said that there are pages for them."""
        copies: list[tuple[int, int]] = []
        for job, sequence in joining:
            assert job.table is not None, "a job gets its pages when it is admitted"
            pages = job.table.pages
            if len(job.tokens) % self._pool.page == 0 or not job.is_last_page_taken:
                self._pool.share(pages)
                table = BlockTable(self._pool, list(pages))
                job.is_last_page_taken = True
            else:
                own = self._allocate(1)
                self._pool.share(pages[:-1])
                table = BlockTable(self._pool, [*pages[:-1], *own])
                copies.append((pages[-1], own[0]))
            self._indices.set_table(len(self.sequences), table.pages)
            self.sequences.append(sequence)
            self.tables.append(table)
        if copies:
            # Now, because pages of a sequence that leaves before its first step become another's
            pools = [array for layer in self._layers() for array in layer]
            mx.async_eval(copy_pages(pools, *zip(*copies, strict=True)))
        self._due = 0

    def leave(self, indices: Ordered[int], *, waits: bool) -> None:
        """Remove sequences; the last ones take their indices."""
        moves = moves_of(indices, len(self.sequences))
        fill(self.sequences, moves, len(indices))
        fill(self.tables, moves, len(indices))
        for index, _ in moves:
            self._indices.set_table(index, self.tables[index].pages)

    def reserve(self, num_joining: int) -> bool:
        """Give each row a page for its next position, and leave one for each sequence that joins next; False where too
        few are free, and nothing is given."""
        if self._num_steps < self._due and not num_joining:
            return True
        num_free = self._pool.num_free - num_joining
        for ahead in (AHEAD, 0):
            short = [index for index, room in enumerate(self._rooms()) if room <= ahead]
            if not (urgent := min(self._rooms(), default=1) <= 0) or len(short) <= num_free:
                break
        if urgent and len(short) > num_free:
            return False
        for index in short if urgent else ():
            self.tables[index].pages += self._allocate(1)
            self._indices.set_table(index, self.tables[index].pages)
        if not num_joining:
            self._due = self._num_steps + min(self._rooms(), default=0)
        return num_free >= 0

    def forward(
        self, loras: LoraSelector, num_running: int, tokens_B: mx.array, query_lengths: Ordered[int] = ()
    ) -> mx.array:
        """Feed `tokens_B`, the newest of the first sequences, int32; hidden states (B, H). A captured step is
        launched at once, all others are not evaluated."""
        if query_lengths:
            raise NotImplementedError("a step reads pages for one token of each sequence")
        if not self.reserve(0):
            raise RuntimeError("no page is free for a step that was scheduled")
        running, num_tokens = self.sequences[:num_running], len(tokens_B)
        min_rows = self._captured.min_rows if self._may_be_captured else 1
        num_fillers = row_bucket(max(num_tokens, min_rows)) - num_tokens
        lengths = [sequence.num_cached for sequence in running]
        tables_BN, lengths_B = self._indices.arrays(lengths, num_fillers, self._pool.page)
        self._metadata.set_traced(lengths_B, tables_BN, num_positions=tables_BN.shape[1] * self._pool.page)
        self._num_steps += 1
        # of the device's own zeros: MLX would fetch new ones from the host in each step
        zeros = interned_array((0,) * num_fillers, mx.int32)
        padded_B = mx.concatenate([tokens_B, zeros]) if num_fillers else tokens_B
        lora = loras.select([sequence.adapter for sequence in running] + [running[0].adapter] * num_fillers)
        self._may_be_captured = lora is None or isinstance(lora, SegmentedLora)
        return self._hidden(padded_B, lora)[:num_tokens]

    def _hidden(self, tokens_B: mx.array, lora: LoraBinding | None) -> mx.array:
        layers = self._layers()
        pools = [array for layer in layers for array in layer]
        if lora is None or isinstance(lora, SegmentedLora):
            tables_BN, lengths_B = self._metadata.slots_B, self._metadata.lengths_B
            hidden_BH = self._captured(tokens_B, lengths_B, tables_BN, pools, lora)
            if hidden_BH is not None:
                return hidden_BH
        if self._compiled and (lora is None or isinstance(lora, SingleLora | SegmentedLora)):
            try:
                return self._compiled(tokens_B, self._metadata, pools, lora)[0]
            except ValueError as error:  # MLX's, for a model that reads an array while it runs, such as dbrx
                logger.warning("decoding is not compiled: %s", error)
                self._compiled = None
        caches = [PagedCache(self._metadata, layer) for layer in layers]
        return self._model.hidden(tokens_B[:, None], caches, lora)[:, 0]

    def _rooms(self) -> list[int]:
        """Positions that each row's pages still have; of a row that only computes what is dropped, more than any."""
        size = self._pool.page
        return [
            len(table.pages) * size - sequence.num_cached if sequence.num_left > 0 else size
            for table, sequence in zip(self.tables, self.sequences, strict=True)
        ]

    def _allocate(self, count: int) -> list[int]:
        pages = self._pool.allocate(count)
        assert pages is not None, "fewer pages than `reserve` has left"
        return pages


class TableIndices:
    """Tables and lengths of a step's rows as arrays on the device, where both stay until a table changes.

    Both are uploaded as one array. Afterwards the device counts lengths itself.
    """

    def __init__(self) -> None:
        self._tables: npt.NDArray[np.int32] = np.full((MIN_TABLE, MIN_TABLE), SCRATCH, np.int32)  # twice what is needed
        self._has_changed = True
        self._lengths: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._num_running = 0
        self._growth: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._tables_BN = self._lengths_B = self._growth_B = mx.array([], mx.int32)

    def set_table(self, row: int, pages: Ordered[int]) -> None:
        """Row `row` of the next step has these pages."""
        rows, width = self._tables.shape
        if row >= rows or len(pages) > width:
            grown = np.full((_doubled(rows, row + 1), _doubled(width, len(pages))), SCRATCH, np.int32)
            grown[:rows, :width] = self._tables
            self._tables = grown
        self._tables[row, : len(pages)] = pages
        self._tables[row, len(pages) :] = SCRATCH
        self._has_changed = True

    def arrays(self, lengths: Ordered[int], num_fillers: int, page: int) -> tuple[mx.array, mx.array]:
        """Tables (B, N) and lengths (B,), int32, with rows of length 0 in the scratch page after the others."""
        num_rows, num_running = len(lengths) + num_fillers, len(lengths)
        width = _doubled(MIN_TABLE, max(lengths) // page + 1)
        all_lengths = np.zeros(max(num_rows, MIN_ON_DEVICE), np.int32)
        all_lengths[:num_running] = lengths
        is_same = num_running == self._num_running and self._tables_BN.shape == (num_rows, width)
        if self._has_changed or not is_same:
            tables = np.full((num_rows, width), SCRATCH, np.int32)
            known = self._tables[:num_running, :width]
            tables[: known.shape[0], : known.shape[1]] = known
            copied = uploaded(np.concatenate([tables.ravel(), all_lengths]))
            self._tables_BN, self._lengths_B = copied[: tables.size].reshape(tables.shape), copied[tables.size :]
            self._has_changed = False
        else:
            growth = all_lengths - self._lengths
            if not np.array_equal(growth, self._growth):
                self._growth, self._growth_B = growth, interned_array(tuple(growth.tolist()), mx.int32)
            self._lengths_B = self._lengths_B + self._growth_B
        self._lengths, self._num_running = all_lengths, num_running
        return self._tables_BN, self._lengths_B if num_rows >= MIN_ON_DEVICE else self._lengths_B[:num_rows]


def table_widths(max_positions: int) -> list[int]:
    """Widths of the tables of steps whose rows have at most so many positions."""
    widths = [MIN_TABLE]
    while widths[-1] * PAGE < max_positions:
        widths.append(2 * widths[-1])
    return widths


def _doubled(size: int, number: int) -> int:
    while size < number:
        size *= 2
    return size
