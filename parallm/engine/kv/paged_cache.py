"""Keys and values of the sequences that decode together, in pages of one pool for each layer.

The kernel of a step (`model/kernels/paged_attention.py`) writes each row's key and value into the row's newest page
and reads its others by a table of pages. mlx-lm's models see a `PagedCache` per layer through the interface of mlx-lm's
caches; a model that computes with keys itself cannot have pages (`can_decode`).

Axes: B rows, N pages of a table, P pages of the pool, H key-value heads, Q query heads, T positions of a page, D head
size.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.model.kernels.cuda import has_kernels, listed_kernels
from parallm.model.kernels.page_write import PAGE
from parallm.model.kernels.paged_attention import append_and_attend, fits
from parallm.model.patches.forward import OwnCache
from parallm.model.patches.rotary import before_rotation
from parallm.model.shared_model import SharedModel

Pool = tuple[mx.array, mx.array]
"""Keys and values of a layer, (P, H, T, D) each."""


class NotPaged(Exception):
    """A layer's attention cannot read pages."""


class PagedCache(OwnCache):
    """One layer's keys and values for the rows of a step, whose tables stand in the metadata in place of slots."""

    def __init__(self, metadata: AttentionMetadata, pool: Sequence[mx.array]) -> None:
        self.state: list[mx.array] = []
        """What a step replaces: nothing, because the pool is written in place."""
        self.num_attended = 0
        self._metadata = metadata
        self._pool = pool  # keys and values (P, H, T, D)
        self._newest: tuple[mx.array, mx.array] | None = None  # between `update_and_fetch` and `attend` only

    @staticmethod
    def num_positions(tables_BN: mx.array, _: Sequence[mx.array]) -> int:
        """Positions that a row of a compiled step can have."""
        return tables_BN.shape[1] * PAGE

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, (B,): what rotary embeddings need."""
        return self._metadata.lengths_B

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """A mask that says which window `attend` shall use; it is never computed."""
        return self._metadata.mask(window_size, return_array)

    def update_and_fetch(self, keys_BH1D: mx.array, values_BH1D: mx.array) -> tuple[mx.array, mx.array]:
        """The step's own keys and values, which `attend` writes; those in the pages come to no model."""
        self._newest = keys_BH1D, values_BH1D
        return keys_BH1D, values_BH1D

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
        """Queries (B, Q, 1, D) over what the rows' pages hold, and keys and values (B, H, 1, D) -> (B, Q, 1, D). Raises
        NotPaged for what the kernel does not compute."""
        newest, self._newest = self._newest, None
        window = self._metadata.window_of(mask)
        own = newest is not None and newest[0] is keys and newest[1] is values
        if not own or window is None or not fits(queries, *self._pool):
            raise NotPaged
        self.num_attended += 1
        keys_PHTD, values_PHTD = self._pool
        queries, keys, rotation = before_rotation(queries, keys, self._metadata.lengths_B, keys_PHTD.dtype)
        rotary = None if rotation is None else self._metadata.rotary(rotation)
        plan = self._metadata.page_plan(queries.shape[1], keys.shape[1], queries.shape[3], window)
        return append_and_attend(
            queries,
            keys,
            values,
            keys_PHTD,
            values_PHTD,
            plan,
            scale=scale,
            rotary=rotary,
            sinks_Q=None if sinks is None else sinks.astype(mx.float32),
        )


def can_decode(model: SharedModel) -> bool:
    """Whether each layer's attention of a decode step can read pages on this device; evaluates and compiles nothing."""
    if not has_kernels() or not model.is_batch_invariant:
        return False
    metadata = AttentionMetadata()
    rows_4, tables_41 = mx.zeros(4, mx.int32), mx.zeros((4, 1), mx.int32)
    metadata.set_traced(rows_4, tables_41, num_positions=PAGE)
    with listed_kernels():
        caches = [PagedCache(metadata, pool) for pool in make_pools(model, 1)]
        if len(caches) < len(model.make_cache()):
            return False
        try:
            model.hidden(rows_4[:, None], caches, None)
        except NotPaged:
            return False
    return all(cache.num_attended == 1 for cache in caches)


def make_pools(model: SharedModel, num_pages: int) -> list[Pool]:
    """Keys and values (P, H, T, D) of each layer, zeros, not evaluated; without those that keep none."""
    layers = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), layers, None)  # of which only the shapes are of interest
    pairs = [layer.keys_and_values() for layer in layers if layer.keys is not None]
    return [(_pool(keys, num_pages), _pool(values, num_pages)) for keys, values in pairs]


def grown(pool_PHTD: mx.array, num_pages: int) -> mx.array:
    """A larger pool with the same first pages; not evaluated."""
    larger = mx.zeros((num_pages, *pool_PHTD.shape[1:]), pool_PHTD.dtype)
    larger[: pool_PHTD.shape[0]] = pool_PHTD
    return larger


def first_page(pool_PHTD: mx.array) -> mx.array:
    """A view (1, H, T, D); not evaluated."""
    return pool_PHTD[:1]


def _pool(like_1HTD: mx.array, num_pages: int) -> mx.array:
    _, heads, _, size = like_1HTD.shape
    return mx.zeros((num_pages, heads, PAGE, size), like_1HTD.dtype)
