"""Causal attention of sequences of any lengths that lie one after the other, in one launch a layer, with its gradient.

A sequence may continue a prefix that others continue too: completions of one prompt read its keys and values where they
are, and the gradient of those is one sum. Forward and gradient follow FlashAttention-2
(https://arxiv.org/abs/2307.08691) with tensor cores of sm_80 and newer: scores never exist, and nothing is added
atomically, so results repeat to the bit. Queries and keys have kernels of their own; heads of a group share tiles.
Scores and sums are float32; weights and their slopes are rounded to the arrays' type before they are multiplied.
On Hopper GPUs the forward multiplies by warpgroups, as FlashAttention-3 does (https://arxiv.org/abs/2407.08608).

Axes: M tokens, S sequences, Q query heads, H key-value heads, D head size, X tiles, Y visits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from parallm.model.kernels.cuda import architecture, has_kernels, kernel
from parallm.model.kernels.page_write import PAGE

Defines = tuple[tuple[str, int | bool | str | mx.Dtype], ...]

FORWARD, QUERIES, KEYS = "flash_attention", "flash_attention_queries", "flash_attention_keys"
HOPPER = "flash_attention_hopper"
FORWARDS = FORWARD, HOPPER
HOPPER_SIZES = 64, 128
"""Head sizes that `HOPPER` takes."""
PADDING = -1
"""In place of the number of prefix tokens: tokens that see nothing. Their results are zeros, whatever they hold."""
DTYPES = (mx.bfloat16, mx.float16)
MAX_HEAD_SIZE, HEAD_UNIT = 128, 16
MAX_ELEMENTS = 2**31
WARPGROUP = 128  # threads
NO_WINDOW = 2**30
SLOTS = 264
"""Blocks that an H200 runs at once: visits of a tile are cut where one block would take longer than its share."""
MIN_CUT = 2048  # packed rows
NOT_PAGED, PAGED = ("PAGED", False), ("PAGED", True)
MAX_CHUNKS = 64
"""The parameters of one call of `attend_pages`."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a block keeps and streams, chosen by registers and shared memory (sm_90)."""

    warps: int
    fragments: int
    """Groups of 16 rows of each warp."""
    columns: int
    """Rows of a streamed tile."""
    blocks: int
    """Blocks of an SM, which bound the registers."""
    stages: int = 2
    """Streamed tiles in shared memory."""
    registers: tuple[int, int] | None = None
    """Those of a thread that has rows and of one that streams tiles, of which there is a warpgroup more; None: threads
    with rows do both."""

    @property
    def rows(self) -> int:
        return 16 * self.fragments * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps + (WARPGROUP if self.registers else 0)


class _Use:
    is_off = False


_use = _Use()


def turn_off_hopper() -> None:
    """Compute forwards by `FORWARD` from now on."""
    _use.is_off = True


@contextmanager
def without_hopper() -> Iterator[None]:
    """Inside the block forwards are computed by `FORWARD`."""
    before, _use.is_off = _use.is_off, True
    try:
        yield
    finally:
        _use.is_off = before


def forward_kernel(head_size: int) -> str:
    """The kernel of the forward here."""
    has_warpgroups = has_kernels() and architecture() == "sm_90" and not _use.is_off
    return HOPPER if has_warpgroups and head_size in HOPPER_SIZES else FORWARD


@cache
def tiling(name: str, head_size: int) -> Tiling:
    """The tiling of a kernel: none spills registers, and each but `HOPPER` fits into the 99 KB of a block that any GPU
    has."""
    small = {
        FORWARD: Tiling(4, 1, 64, 4),
        HOPPER: Tiling(12, 1, 128, 1, stages=4, registers=(160, 32)),
        QUERIES: Tiling(4, 1, 64, 3),
        KEYS: Tiling(4, 1, 64, 2),
    }
    large = {
        FORWARD: Tiling(4, 1, 64, 2),
        HOPPER: Tiling(12, 1, 64, 1, stages=4, registers=(152, 56)),
        QUERIES: Tiling(4, 1, 48, 2),
        KEYS: Tiling(4, 1, 32, 2),
    }
    return (small if head_size <= 64 else large)[name]


def fits(queries_MQD: mx.array, keys_MHD: mx.array, values_MHD: mx.array) -> bool:
    """Whether the kernels take these arrays, here."""
    size = queries_MQD.shape[-1]
    return (
        has_kernels()
        and queries_MQD.dtype in DTYPES
        and queries_MQD.dtype == keys_MHD.dtype == values_MHD.dtype
        and keys_MHD.shape == values_MHD.shape
        and size % HEAD_UNIT == 0
        and size <= MAX_HEAD_SIZE
        and queries_MQD.size < MAX_ELEMENTS
    )


def specializations(dtype: mx.Dtype, head_size: int, repeats: int) -> Iterator[tuple[str, Defines]]:
    """The kernels of a model, whose key heads have `repeats` query heads each."""
    forward = forward_kernel(head_size)
    yield forward, (*_defines(forward, dtype, head_size, repeats), NOT_PAGED)
    yield QUERIES, _defines(QUERIES, dtype, head_size, repeats)
    for partial in (False, True):
        yield KEYS, _defines(KEYS, dtype, head_size, repeats, partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTiles:
    """Work of the gradient of keys and values, int32."""

    partial_X4: np.ndarray
    """First token, tokens, first visit, visits: each a part of what visits a tile, summed in float32."""
    tiles_X4: np.ndarray
    """The same, of whole tiles; or first token, tokens, first index in `partial_X4`, minus the number of parts."""
    visits_Y4: np.ndarray
    """First token of the queries, tokens, position of the first query less that of the tile's first key, 0."""


@dataclass(frozen=True, slots=True)
class WorkLists:
    """`query_tiles` of the forward and of the gradient of queries, and the parts of `KeyTiles`, on the device."""

    forward: mx.array
    queries: mx.array
    partial: mx.array
    keys: mx.array
    visits: mx.array


class PackedSequences:
    """The layout of a pass, and its work lists: made once on the host, the same for all layers."""

    def __init__(self, sequences_S4: np.ndarray, num_tokens: int) -> None:
        """First token, tokens, first token of the prefix, its tokens (0: none), in the order of the tokens; tokens up
        to `num_tokens` after the last sequence are padding."""
        used = int(sequences_S4[:, :2].sum(axis=1).max(initial=0))
        padding = np.array([[used, num_tokens - used, 0, PADDING]])
        self.sequences_S4 = np.concatenate([sequences_S4, padding]) if used < num_tokens else sequences_S4
        self._lists: dict[tuple[int, int, int], WorkLists] = {}

    def attend(
        self,
        queries_MQD: mx.array,
        keys_MHD: mx.array,
        values_MHD: mx.array,
        *,
        scale: float,
        window: int | None = None,
        sinks_Q: mx.array | None = None,
    ) -> mx.array:
        """Attention (M, Q, D), differentiable by all arrays, for those that `fits`. A token sees itself and what lies
        before it in its sequence and its prefix: the last `window` positions, if given. `sinks_Q` are logits that take
        part in the softmax and carry no value."""
        heads, size = keys_MHD.shape[1:]
        repeats = queries_MQD.shape[1] // heads
        layer = _Layer(
            dtype=queries_MQD.dtype,
            heads=heads,
            repeats=repeats,
            size=size,
            scalars=(heads, window or NO_WINDOW, float(scale)),
            lists=self._arrays(size, repeats, heads),
        )
        function = mx.custom_function(layer.forward)
        function.vjp(layer.backward)
        sinks = mx.full((heads * repeats,), -mx.inf) if sinks_Q is None else sinks_Q.astype(mx.float32)
        attended: mx.array = function(queries_MQD, keys_MHD, values_MHD, sinks)[0]
        return attended

    def _arrays(self, size: int, repeats: int, heads: int) -> WorkLists:
        key = (size, repeats, heads)
        if key not in self._lists:
            forward, queries = (
                query_tiles(self.sequences_S4, repeats, tiling(name, size).rows)
                for name in (forward_kernel(size), QUERIES)
            )
            keys = key_tiles(self.sequences_S4, repeats, heads, tiling(KEYS, size).rows)
            arrays = (forward, queries, keys.partial_X4, keys.tiles_X4, keys.visits_Y4)
            self._lists[key] = WorkLists(*(mx.array(array.astype(np.int32)) for array in arrays))
        return self._lists[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The launches of one layer."""

    dtype: mx.Dtype
    heads: int
    repeats: int
    size: int
    scalars: tuple[int, int, float]
    lists: WorkLists

    def forward(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> tuple[mx.array, mx.array]:
        """The result, and the logarithm of each softmax's sum (M, Q), float32."""
        tiles = self.lists.forward
        types = [self.dtype, mx.float32]
        name = forward_kernel(self.size)
        o, lse = self._launch(name, [q, k, v, sinks, tiles], len(tiles), [q.shape, q.shape[:2]], types)
        return o, lse

    def backward(
        self, primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        """Gradients of the arguments of `forward`, given that of its first result."""
        (q, k, v, sinks), (o, lse), gradient, lists = primals, outputs, cotangents[0], self.lists
        inputs, types = [q, k, v, o, gradient, lse, lists.queries], [self.dtype, mx.float32]
        q_gradient, delta = self._launch(QUERIES, inputs, len(lists.queries), [q.shape, q.shape[:2]], types)
        inputs, partials = [q, k, v, gradient, lse, delta], [lse, lse]  # not read where there are none
        if lists.partial.size:
            shape = (_roomy(len(lists.partial)), self.heads, tiling(KEYS, self.size).rows, self.size)
            work, types = [lists.partial, lists.visits, *partials], [mx.float32] * 2
            partials = self._launch(KEYS, [*inputs, *work], len(lists.partial), [shape] * 2, types, partial=True)
        work, types = [lists.keys, lists.visits, *partials], [self.dtype] * 2
        k_gradient, v_gradient = self._launch(KEYS, [*inputs, *work], len(lists.keys), [k.shape] * 2, types)
        # a sink is one more key, whose value is zero
        return q_gradient, k_gradient, v_gradient, -(mx.exp(sinks - lse) * delta).sum(axis=0)

    def _launch(
        self,
        name: str,
        inputs: Sequence[mx.array],
        num_tiles: int,
        shapes: Sequence[tuple[int, ...]],
        types: Sequence[mx.Dtype],
        *,
        partial: bool = False,
    ) -> list[mx.array]:
        threads = tiling(name, self.size).threads
        defines = _defines(name, self.dtype, self.size, self.repeats, partial)
        if name in FORWARDS:
            defines = (*defines, NOT_PAGED)
        return kernel(name, defines, shared_memory=_shared_memory(name, self.size))(
            inputs,
            self.scalars,
            grid=(num_tiles * self.heads * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=types,
        )


def attend_pages(
    queries_MQD: mx.array,
    keys_PHTD: mx.array,
    values_PHTD: mx.array,
    pages_N: mx.array,
    tiles_X8: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks_Q: mx.array | None = None,
) -> mx.array:
    """Attention (M, Q, D) of tokens whose keys and values are in pages, their own ones included; see
    `PackedSequences.attend`.

    `tiles_X8` are `page_tiles`, int32, which say where in `pages_N`, int32, the pages of each sequence stand.
    """
    repeats, size = queries_MQD.shape[1] // keys_PHTD.shape[1], queries_MQD.shape[2]
    name, heads, dtype = forward_kernel(size), keys_PHTD.shape[1], queries_MQD.dtype
    threads = tiling(name, size).threads
    sinks = mx.full((heads * repeats,), -mx.inf) if sinks_Q is None else sinks_Q.astype(mx.float32)
    defines = (*_defines(name, dtype, size, repeats), PAGED)
    attended: mx.array = kernel(name, defines, shared_memory=_shared_memory(name, size))(
        [queries_MQD, keys_PHTD, values_PHTD, sinks, tiles_X8, pages_N],
        [heads, window or NO_WINDOW, float(scale)],
        grid=(len(tiles_X8) * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[queries_MQD.shape, queries_MQD.shape[:2]],
        output_dtypes=[dtype, mx.float32],
    )[0]
    return attended


def fits_pages(queries_MQ1D: mx.array, keys_PHTD: mx.array, values_PHTD: mx.array) -> bool:
    """Whether `attend_pages` takes queries like these, here: tiles of keys are whole pages."""
    return fits(queries_MQ1D, keys_PHTD, values_PHTD) and keys_PHTD.shape[2:] == (PAGE, queries_MQ1D.shape[-1])


def page_tiles(chunks: Sequence[tuple[int, int, int]], num_tokens: int, repeats: int, head_size: int) -> np.ndarray:
    """`query_tiles` of chunks of sequences one after the other: their tokens, the tokens before these, and the index of
    the sequence's first page. The rest of `num_tokens` is padding. Empty tiles follow up to a number that is the same
    for as many tokens, of as many as `MAX_CHUNKS` chunks."""
    starts = np.cumsum([0, *(count for count, _, _ in chunks)])
    sequences = [(start, count, page, before) for start, (count, before, page) in zip(starts, chunks, strict=False)]
    sequences.append((starts[-1], num_tokens - starts[-1], 0, PADDING))
    rows = tiling(forward_kernel(head_size), head_size).rows
    tiles_X8 = query_tiles(np.array(sequences), repeats, rows)
    num_empty = num_tokens * repeats // rows + MAX_CHUNKS + 1 - len(tiles_X8)
    return np.concatenate([tiles_X8, np.tile([0, 0, 0, PADDING, 0, 0, 0, 0], (num_empty, 1))])


def query_tiles(sequences_S4: np.ndarray, repeats: int, rows: int) -> np.ndarray:
    """Tiles of `rows` packed rows (X, 8), those with most keys first: the sequence, its first row in the tile, 0, 0, 0.

    Row m of a sequence is its token m // `repeats`, query head m % `repeats` of a group.
    """
    rows_S = sequences_S4[:, 1] * repeats
    index_X, begin_X = _cut(rows_S, rows)
    tiles_X8 = np.zeros((len(index_X), 8), np.int64)
    tiles_X8[:, :4], tiles_X8[:, 4] = sequences_S4[index_X], begin_X
    seen_X = tiles_X8[:, 3] + np.minimum(begin_X + rows, rows_S[index_X]) // repeats
    return tiles_X8[np.argsort(-seen_X, kind="stable")]


def key_tiles(sequences_S4: np.ndarray, repeats: int, heads: int, rows: int) -> KeyTiles:
    """Tiles of `rows` keys and the queries that see them, those with most first."""
    followers = _followers(sequences_S4)
    index_X, begin_X = _cut(sequences_S4[:, 1], rows)
    start_X, length_X, _, prefix_X = sequences_S4[index_X].T
    left_X = length_X - begin_X
    more_X = np.array([sum(count for _, count in followers.get(start, ())) for start in sequences_S4[:, 0].tolist()])
    seen_X = (left_X + more_X[index_X]) * (prefix_X != PADDING)
    limit = max(MIN_CUT, -(-int(seen_X.sum()) * repeats * heads // SLOTS)) // repeats  # tokens
    tiles_X4 = np.stack([start_X + begin_X, np.minimum(rows, left_X), np.arange(len(index_X)), seen_X > 0], axis=1)
    visits: list[tuple[int, int, int]] = np.stack([tiles_X4[:, 0], seen_X, 0 * seen_X], axis=1).tolist()
    partial: list[tuple[int, int, int, int]] = []
    # most tiles have one visit, by what follows them in their own sequence; these have several
    for tile in np.flatnonzero((more_X[index_X] > 0) | (seen_X > limit)).tolist():
        first, num_keys, start, left = (int(n) for n in (*tiles_X4[tile, :2], start_X[tile], left_X[tile]))
        own = [(first, left, 0)]
        chunks = list(_chunks([*own, *((at, count, left) for at, count in followers.get(start, ()))], limit))
        first_partial = len(partial)
        for chunk in chunks:
            partial.append((first, num_keys, len(visits), len(chunk)))
            visits += chunk
        tiles_X4[tile, 2:] = (first_partial, -len(chunks)) if len(chunks) > 1 else partial.pop()[2:]
    order_X = np.argsort(np.where(tiles_X4[:, 3] < 0, 1, -seen_X), kind="stable")  # sums of parts are short
    return KeyTiles(
        partial_X4=np.asarray(partial, np.int64).reshape(-1, 4),
        tiles_X4=tiles_X4[order_X],
        visits_Y4=np.pad(np.asarray(visits, np.int64).reshape(-1, 3), ((0, 0), (0, 1))),
    )


def _cut(lengths_S: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of at most `size`: the index of each one's length, and where it begins."""
    counts_S = -(-lengths_S // size)
    index_X = np.repeat(np.arange(len(lengths_S)), counts_S)
    return index_X, (np.arange(len(index_X)) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)) * size


def _followers(sequences_S4: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """First token and number of tokens of the sequences that continue each prefix, by its first token."""
    followers: dict[int, list[tuple[int, int]]] = {}
    for start, length, prefix_start, prefix in sequences_S4.tolist():
        if length and prefix > 0:
            followers.setdefault(prefix_start, []).append((start, length))
    return followers


def _chunks(visits: list[tuple[int, int, int]], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Visits in order, in chunks of at most `limit` tokens; a long one is cut."""
    chunk: list[tuple[int, int, int]] = []
    free = limit
    for start, length, distance in visits:
        done = 0
        while done < length:
            if not free:
                yield chunk
                chunk, free = [], limit
            taken = min(free, length - done)
            chunk.append((start + done, taken, distance + done))
            done, free = done + taken, free - taken
    yield chunk


def _roomy(count: int) -> int:
    """At least `count`, of a few sizes, so that MLX's cache of buffers has one."""
    return 1 << (count - 1).bit_length()


def _defines(name: str, dtype: mx.Dtype, head_size: int, repeats: int, partial: bool = False) -> Defines:
    chosen = tiling(name, head_size)
    constants: Defines = (
        ("T", dtype),
        ("HEAD", head_size),
        ("REPEATS", repeats),
        ("WARPS", chosen.warps),
        ("FRAGMENTS", chosen.fragments),
        ("COLUMNS", chosen.columns),
        ("STAGES", chosen.stages),
        ("BLOCKS", chosen.blocks),
    )
    if chosen.registers:
        own, spare = chosen.registers
        return (*constants, ("OWN", own), ("SPARE", spare))
    if name != KEYS:
        return constants
    return (*constants, ("PARTIAL", partial), ("OUTPUT", mx.float32 if partial else dtype))


def _shared_memory(name: str, head_size: int) -> int:
    """Bytes of rows that a block keeps and streams, and of their log-sums and deltas, or of barriers."""
    chosen = tiling(name, head_size)
    kept = chosen.rows * (1 if name in FORWARDS else 2)
    rows = kept + 2 * chosen.stages * chosen.columns
    if name == HOPPER:
        return rows * head_size * 2 + 16 * chosen.stages
    return rows * (head_size + 8) * 2 + (8 * chosen.stages * chosen.columns) * (name == KEYS)
