"""Keys and values of the sequences that decode together: a slot for each, allocated in few steps, written in O(1).

With MLX's CUDA build each row reads the positions that it has, in any slot; elsewhere all rows read as many as the
longest one has, but for outliers (`attention_metadata.py`), and `slot_manager.py` keeps the slots at 0 to n-1. mlx-lm's
models see a `SlotCache` per layer through the interface of mlx-lm's caches (`offset`, `update_and_fetch`, `make_mask`).

Axes: S slots, B rows, A outlier rows, H key-value heads, Q query heads, L positions, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.model.attention import attention
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.decode_attention import append_and_attend, fits
from parallm.model.patches.forward import OwnCache
from parallm.model.patches.rotary import before_rotation
from parallm.model.shared_model import PlainCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What `attend` can read in place of what the model got from `update_and_fetch`."""

    view: mx.array
    """The keys that the model got; `attend` recognises them."""
    keys: mx.array
    """The step's own, (B, H, 1, D); contents of the slots, (S, H, L, D), where several rows share one."""
    values: mx.array
    buffers: list[mx.array] = field(default_factory=list)
    """The buffers before the step's own were written; none where rows share slots."""


class SlotCache(OwnCache):
    """One layer's keys and values for all slots of a batch."""

    def __init__(self, metadata: AttentionMetadata, buffers: Sequence[mx.array] = ()) -> None:
        self._metadata = metadata
        self.state = list(buffers)
        """Keys and values (S, H, L, D); empty before the first sequence."""
        self._fetched: Fetched | None = None  # set between `update_and_fetch` and `attend` only

    @staticmethod
    def num_positions(_: mx.array, buffers: Sequence[mx.array]) -> int:
        """Positions that a row of a compiled step can have."""
        return buffers[0].shape[2]

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, (B,): what rotary embeddings need."""
        return self._metadata.lengths_B

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Positions that each row may see, (B, 1, 1, L); None where all may see all."""
        return self._metadata.mask(window_size, return_array)

    def update_and_fetch(self, keys_BH1D: mx.array, values_BH1D: mx.array) -> tuple[mx.array, mx.array]:
        """Write one position per row; views of the slots' keys and values up to the longest row."""
        metadata, before, self._fetched = self._metadata, self.state, None
        assert before, "a sequence joined before the first step"
        if on_cuda():  # new names for the written arrays, so that `attend` finds the buffers as they were
            self.state = [buffer[...] for buffer in before]
        for buffer, new in zip(self.state, (keys_BH1D, values_BH1D), strict=True):
            buffer[metadata.slots_B, :, metadata.lengths_B] = new[:, :, 0]
        keys, values = (buffer[metadata.read_slots, :, : metadata.num_read] for buffer in self.state)
        if metadata.spans is not None:
            # for models that compute with keys themselves; `attend` never evaluates these copies
            copies = keys[metadata.spans.slots_B], values[metadata.spans.slots_B]
            self._fetched = Fetched(view=copies[0], keys=keys, values=values)
            return copies
        if on_cuda():
            self._fetched = Fetched(view=keys, keys=keys_BH1D, values=values_BH1D, buffers=before)
        return keys, values

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
        """Queries (B, Q, 1, D) over views (B, H, L, D) -> (B, Q, 1, D). A kernel that can do it writes the step's keys
        and values, too, and the write that the views wait for is never evaluated."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None and keys is fetched.view:
            if self._metadata.spans is not None:
                span_mask = self._metadata.span_mask(mask)
                if span_mask is not None:
                    grouped = self._metadata.spans.gathered(queries)
                    output = attention(grouped, fetched.keys, fetched.values, scale=scale, mask=span_mask, sinks=sinks)
                    return self._metadata.spans.scattered(output)
            else:
                window = self._metadata.window_of(mask)
                if window is not None and sinks is None and fits(queries, *fetched.buffers):
                    self.state = fetched.buffers
                    return self._append_and_attend(queries, fetched, scale, window)
        self._metadata.needs_contiguous = True
        del fetched  # no other name may hold the buffers when they are written, or MLX copies them
        outliers = self._metadata.outliers
        if outliers is None or not isinstance(mask, mx.array):
            return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        part, rows_A = slice(0, outliers.num_read), mx.array(outliers.rows)
        output = attention(
            queries, keys[:, :, part], values[:, :, part], scale=scale, mask=mask[..., part], sinks=sinks
        )
        output[rows_A] = attention(
            queries[rows_A], keys[rows_A], values[rows_A], scale=scale, mask=mask[rows_A], sinks=sinks
        )
        return output

    def _append_and_attend(self, queries: mx.array, fetched: Fetched, scale: float, window: int) -> mx.array:
        keys_SHLD, values_SHLD = fetched.buffers
        slots_B, lengths_B = self._metadata.slots_B, self._metadata.lengths_B
        queries, keys, rotation = before_rotation(queries, fetched.keys, lengths_B, keys_SHLD.dtype)
        return append_and_attend(
            queries,
            keys,
            fetched.values,
            keys_SHLD,
            values_SHLD,
            slots_B,
            lengths_B,
            scale=scale,
            window=window,
            rotary=None if rotation is None else self._metadata.rotary(rotation),
        )

    def allocate(self, prompts: PlainCache) -> None:
        """Create buffers for keys and values like these, if there are none."""
        if not self.state:
            self.state = [self._empty(array) for array in prompts.keys_and_values()]

    def join(self, slots: slice | mx.array, prompts: PlainCache, rows: slice | mx.array) -> None:
        """Copy keys and values of `rows` of computed prompts, one for each of `slots` or one for all of them.

        What is after a shorter prompt's end is copied along, as far as the slot reaches; no row reads it.
        """
        part = slice(0, min(prompts.offset, self._metadata.shape.num_positions))
        for buffer, array in zip(self.state, prompts.keys_and_values(), strict=True):
            buffer[slots, :, part] = array[rows, :, part]

    def clear(self, slot: int) -> None:
        """Write zeros over a slot: what is after a row's end is multiplied by zero, and NaN times zero is NaN."""
        for buffer in self.state:
            buffer[slot : slot + 1] = 0

    def resize(self, slots: slice | mx.array) -> list[mx.array]:
        """Bring the buffers to the metadata's shape, with these slots as the first ones; returns what to evaluate."""
        self.state = [self._resized(buffer, slots) for buffer in self.state]
        return self.state

    def copies(self, slot: int, start: int, end: int) -> list[mx.array]:
        """Copies of these positions of a slot's keys and values, (1, H, end - start, D) each; not evaluated."""
        return [mx.contiguous(buffer[slot : slot + 1, :, start:end]) for buffer in self.state]

    def put(self, slot: int, copies: Sequence[mx.array]) -> None:
        """Write evaluated copies into a slot: MLX writes in place only while no other array waits to read the buffer,
        and would otherwise copy all of it."""
        for buffer, part in zip(self.state, copies, strict=True):
            buffer[slot : slot + 1, :, : part.shape[2]] = part

    def _resized(self, buffer_SHLD: mx.array, slots: slice | mx.array) -> mx.array:
        kept_RHLD = buffer_SHLD[slots, :, : self._metadata.shape.num_positions]
        resized = self._empty(buffer_SHLD)
        resized[: kept_RHLD.shape[0], :, : kept_RHLD.shape[2]] = kept_RHLD
        return resized

    def _empty(self, like: mx.array) -> mx.array:
        shape = self._metadata.shape
        return mx.zeros((shape.num_slots, like.shape[1], shape.num_positions, like.shape[3]), like.dtype)
