"""Keys and values of the rows that decode together: one slot per row, allocated in few steps, written in O(1).

With MLX's CUDA build each row reads the positions that it has, in whatever slot it is (`model/kernels/decode_attention.py`);
elsewhere all rows read as many as the longest one has, or rows that are much longer are computed apart
(`active_rows.py`), and they are slots 0 to n-1: `shard.py` keeps them there.

mlx-lm's models see a `SlotCache` per layer through the interface of mlx-lm's caches (`offset`, `update_and_fetch`,
`make_mask`).

Axes: S slots, B active rows, A rows that are computed apart, H key-value heads, Q query heads,
L positions, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata, QuerySpans
from parallm.engine.kv.cost import KvFormat
from parallm.model.attention import attention
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.decode_attention import append_and_attend, fits
from parallm.model.patches.attention import OwnCache
from parallm.model.patches.rotary import before_rotation
from parallm.model.shared_model import PlainCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """One step's keys and values (B, H, 1, D), and what they were written to."""

    keys: mx.array
    values: mx.array
    pools: list[mx.array]
    """Before the write."""
    view: mx.array
    """The keys that the model got, by which `attend` knows them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadViews:
    """What a layer's slots hold, (S, H, L, D), where several rows share one."""

    keys: mx.array
    values: mx.array
    view: mx.array
    """The keys that the model got, one for each row, by which `attend` knows them again."""


class SlotCache(OwnCache):
    """One layer's keys and values for all slots of a shard."""

    def __init__(self, rows: AttentionMetadata, kv_format: KvFormat, pools: Sequence[mx.array] = ()) -> None:
        self._rows = rows
        self._format = kv_format
        self.state = list(pools)
        """Keys and values (S, H, L, D), or the parts that the format keeps of both; empty before the first row."""
        self._spread_views: SpreadViews | None = None  # the same as below, where rows are spread
        self._appended: Appended | None = None  # between `update_and_fetch` and `attend`, where a kernel may do both

    @property
    def offset(self) -> mx.array:
        """Position of each active row's next token, (B,): what rotary embeddings need."""
        return self._rows.lengths_B

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which positions each active row may see, (B, 1, 1, L), or None where all may see all."""
        return self._rows.mask(window_size, return_array)

    def update_and_fetch(self, keys_BH1D: mx.array, values_BH1D: mx.array) -> tuple[mx.array, mx.array]:
        """Write one position per active row; views of the slots' keys and values up to the longest row."""
        rows, before, self._spread_views = self._rows, self.state, None  # of models that attend by themselves
        assert before, "a row joined before the first step"
        if on_cuda():  # names of their own for what is written, so that `attend` finds the pools as they were
            self.state = [pool[...] for pool in before]
        for pool, new in zip(self.state, self._format.pack(keys_BH1D, values_BH1D), strict=True):
            pool[rows.slots_B, :, rows.lengths_B] = new[:, :, 0]
        keys, values = self._format.unpack([pool[rows.read, :, : rows.view] for pool in self.state])
        if rows.spread is not None:
            return self._spread(keys, values, rows.spread)
        if on_cuda():
            self._appended = Appended(keys=keys_BH1D, values=values_BH1D, pools=before, view=keys)
        return keys, values

    def _spread(self, keys: mx.array, values: mx.array, spread: QuerySpans) -> tuple[mx.array, mx.array]:
        """A copy of its slot for each row, for models that compute with keys themselves; never made for `attend`."""
        found = keys[spread.slots_B], values[spread.slots_B]
        self._spread_views = SpreadViews(keys=keys, values=values, view=found[0])
        return found

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Queries (B, Q, 1, D) over views (B, H, L, D) -> (B, Q, 1, D).

        Where the kernel can do it, it writes the step's keys and values too, and the write that the views wait for is
        never evaluated.
        """
        appended, self._appended = self._appended, None
        spread, self._spread_views = self._spread_views, None
        if spread is not None and keys is spread.view and self._rows.spread is not None:
            grouped_mask = self._rows.spread_mask(mask)
            if grouped_mask is not None:
                grouped = self._rows.spread.gathered(queries)
                of_slots = spread.keys, spread.values
                found = attention(grouped, *of_slots, scale=scale, mask=grouped_mask, sinks=sinks)
                return self._rows.spread.scattered(found)
        del spread
        window = self._rows.window_of(mask)
        if (
            appended is not None
            and keys is appended.view
            and window is not None
            and sinks is None
            and fits(queries, *appended.pools)
        ):
            self.state = appended.pools
            return self._append_and_attend(queries, appended, scale, window)
        self._rows.needs_places = True
        del appended  # nobody else may hold the pools when they are written, or MLX copies them
        apart = self._rows.apart
        if apart is None or not isinstance(mask, mx.array):
            return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        part, rows_A = slice(0, apart.view), mx.array(apart.rows)
        found = attention(queries, keys[:, :, part], values[:, :, part], scale=scale, mask=mask[..., part], sinks=sinks)
        found[rows_A] = attention(
            queries[rows_A], keys[rows_A], values[rows_A], scale=scale, mask=mask[rows_A], sinks=sinks
        )
        return found

    def _append_and_attend(self, queries: mx.array, appended: Appended, scale: float, window: int) -> mx.array:
        keys_SHLD, values_SHLD = appended.pools
        slots_B, lengths_B = self._rows.slots_B, self._rows.lengths_B
        queries, keys, rotation = before_rotation(queries, appended.keys, lengths_B, keys_SHLD.dtype)
        return append_and_attend(
            queries,
            keys,
            appended.values,
            keys_SHLD,
            values_SHLD,
            slots_B,
            lengths_B,
            scale=scale,
            window=window,
            rotary=None if rotation is None else self._rows.rotary(rotation),
        )

    def allocate(self, prompts: PlainCache) -> None:
        """Make pools for keys and values like these, if there are none."""
        if not self.state:
            self.state = [self._empty(part) for part in self._format.pack(*prompts.keys_and_values())]

    def join(self, slots: slice | mx.array, prompts: PlainCache, rows: slice | mx.array) -> None:
        """Copy keys and values of `rows` of computed prompts, one for each of `slots` or one for all of them.

        What is behind a shorter prompt's end comes along, as far as there is room: nobody reads it.
        """
        part = slice(0, min(prompts.offset, self._rows.layout.num_positions))
        keys, values = (array[rows, :, part] for array in prompts.keys_and_values())
        for pool, new in zip(self.state, self._format.pack(keys, values), strict=True):
            pool[slots, :, part] = new

    def clear(self, slot: int) -> None:
        """Write zeros over a slot. What lies behind a row's end is multiplied by zero, and NaN times zero is NaN."""
        for pool in self.state:
            pool[slot : slot + 1] = 0

    def resize(self, slots: slice | mx.array) -> list[mx.array]:
        """Bring the pools to the present layout and keep these slots, as the first ones; what is to be evaluated."""
        self.state = [self._resized(pool, slots) for pool in self.state]
        return self.state

    def copies(self, slot: int, start: int, end: int) -> list[mx.array]:
        """Copies of these positions of a slot's keys and values, (1, H, end - start, D) each; not evaluated."""
        return [mx.contiguous(array[slot : slot + 1, :, start:end]) for array in self.state]

    def put(self, slot: int, row: Sequence[mx.array]) -> None:
        """Write a copied row, which must be evaluated: MLX writes in place only while nothing else waits to read the
        pool, and would else copy all of it."""
        for pool, part in zip(self.state, row, strict=True):
            pool[slot : slot + 1, :, : part.shape[2]] = part

    def _resized(self, pool_SHLD: mx.array, slots: slice | mx.array) -> mx.array:
        kept_RHLD = pool_SHLD[slots, :, : self._rows.layout.num_positions]
        resized = self._empty(pool_SHLD)
        resized[: kept_RHLD.shape[0], :, : kept_RHLD.shape[2]] = kept_RHLD
        return resized

    def _empty(self, like: mx.array) -> mx.array:
        layout = self._rows.layout
        return mx.zeros((layout.num_slots, like.shape[1], layout.num_positions, like.shape[3]), like.dtype)
