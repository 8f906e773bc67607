"""The kernels of flash attention in numpy: the same tiles, indices, masks and order, one warp after the other."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.model.kernels.flash_attention import FORWARD, KEYS, QUERIES

MAX_SHARED_BYTES = 99 * 1024  # of a block, on GPUs with least of it
Constants = dict[str, Any]
Arrays = list[np.ndarray]


def fake_kernel(name: str, defines: tuple[tuple[str, Any], ...], *, shared_memory: int) -> Any:
    """Stands in for `cuda.kernel`."""
    constants = dict(defines)
    assert shared_memory <= MAX_SHARED_BYTES

    def run(inputs: Sequence[mx.array], scalars: Sequence[Any], **launch: Any) -> list[mx.array]:
        arrays = [np.array(array) for array in inputs]
        blocks, rest = divmod(launch["grid"][0], launch["threadgroup"][0])
        assert (rest, launch["threadgroup"][0]) == (0, 32 * constants["WARPS"])
        outputs = [np.full(shape, np.nan, np.float32) for shape in launch["output_shapes"]]
        emulator = {FORWARD: _forward, QUERIES: _queries, KEYS: _keys}[name]
        heads, window, scale = scalars
        for block in range(blocks):
            emulator(constants, arrays, outputs, block // heads, block % heads, heads, window, scale)
        return [mx.array(output).astype(dtype) for output, dtype in zip(outputs, launch["output_dtypes"], strict=True)]

    return run


def _rows(array: np.ndarray, heads: int, tokens: np.ndarray, head: int, member: np.ndarray, size: int) -> np.ndarray:
    """Rows of the flat array of all tokens' query heads; zeros where the token is -1."""
    flat = array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array.reshape(-1, 1)
    index = (tokens * heads + head) * size + member
    return np.where(tokens[:, None] >= 0, flat[np.maximum(index, 0)], 0)


class _Queries:
    def __init__(self, c: dict[str, Any], tile: np.ndarray, window: int) -> None:
        self.size, self.columns = c["REPEATS"], c["COLUMNS"]
        self.warp_rows = 16 * c["FRAGMENTS"]
        self.block_rows = self.warp_rows * c["WARPS"]
        self.start, tokens, self.prefix_start, prefix = (int(number) for number in tile[:4])
        self.begin, self.rows, self.prefix = int(tile[4]), tokens * self.size, max(0, prefix)
        self.end = self.position(min(self.begin + self.block_rows, self.rows) - 1) + 1
        self.first = max(0, self.position(self.begin) - window + 1) // self.columns
        self.count = -(-self.end // self.columns)
        if prefix < 0:
            self.first = self.count = 0

    def position(self, m: Any) -> Any:
        return self.prefix + m // self.size

    def tokens(self, m: np.ndarray) -> np.ndarray:
        return np.where(m < self.rows, self.start + m // self.size, -1)

    def keys(self, t: int) -> np.ndarray:
        at = t * self.columns + np.arange(self.columns)
        token = np.where(at < self.prefix, self.prefix_start + at, self.start + at - self.prefix)
        return np.where(at < self.end, token, -1)

    def page(self, t: int, rows: np.ndarray) -> np.ndarray:
        """A page's rows, zeros after the last position that is seen."""
        assert rows.shape[0] == self.columns
        return np.where((t * self.columns + np.arange(self.columns) < self.end)[:, None], rows, 0)

    def warps(self) -> list[np.ndarray]:
        starts = range(self.begin, self.begin + self.block_rows, self.warp_rows)
        return [np.arange(start, start + self.warp_rows) for start in starts if start < self.rows]

    def seen(self, m: np.ndarray, t: int, window: int) -> np.ndarray | None:
        """None where the warp skips the tile."""
        low, high = self.position(m[0]), self.position(min(m[-1] + 1, self.rows) - 1)
        start = t * self.columns
        if not (start <= high and start + self.columns > low - window + 1):
            return None
        if start + self.columns - 1 <= low and start > high - window:
            return np.ones((len(m), self.columns), bool)
        at, token = start + np.arange(self.columns), self.position(m)[:, None]
        return (at <= token) & (at < self.end) & (at > token - window)


def _forward(
    c: Constants, arrays: Arrays, outputs: Arrays, x: int, head: int, heads: int, window: int, scale: float
) -> None:
    q, k, v, sinks, tiles, *pages = arrays
    tile = _Queries(c, tiles[x], window)
    for m in tile.warps():
        tokens, member = tile.tokens(m), m % tile.size
        queries = _rows(q, heads, tokens if tile.count else np.full_like(tokens, -1), head, member, tile.size)
        largest, total, sums = np.full(len(m), -np.inf), np.zeros(len(m)), np.zeros_like(queries)
        for t in range(tile.first, tile.count):
            seen = tile.seen(m, t, window)
            if seen is None:
                continue
            if pages:
                keys, values = (tile.page(t, a[pages[0][tile.prefix_start + t], head]) for a in (k, v))
            else:
                keys, values = (_rows(a, heads, tile.keys(t), head, np.zeros(1, int), 1) for a in (k, v))
            score = np.where(seen, queries @ keys.T, -np.inf)
            most = np.maximum(largest, score.max(axis=1))
            base = np.where(np.isinf(most), 0, most * scale)
            shrink, p = np.exp(largest * scale - base), np.exp(score * scale - base[:, None])
            largest, total, sums = most, total * shrink + p.sum(axis=1), sums * shrink[:, None] + p @ values
        valid = (tokens >= 0) & (tile.count > 0)
        sink = np.where(valid, sinks[head * tile.size + member], -np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            base = np.maximum(largest * scale, sink)
            shrink = np.exp(largest * scale - base)
            everything = total * shrink + np.exp(sink - base)
            inverse = np.where(valid, shrink / everything, 0)
            lse = np.where(valid, base + np.log(everything), 0)
        index = (tokens * heads + head) * tile.size + member
        for row in np.flatnonzero(tokens >= 0):
            outputs[0].reshape(-1, q.shape[-1])[index[row]] = sums[row] * inverse[row]
            outputs[1].reshape(-1)[index[row]] = lse[row]


def _queries(
    c: Constants, arrays: Arrays, outputs: Arrays, x: int, head: int, heads: int, window: int, scale: float
) -> None:
    q, k, v, o, gradient, lse, tiles = arrays
    tile = _Queries(c, tiles[x], window)
    for m in tile.warps():
        tokens, member = tile.tokens(m), m % tile.size
        read = tokens if tile.count else np.full_like(tokens, -1)
        queries, gradients, out = (_rows(a, heads, read, head, member, tile.size) for a in (q, gradient, o))
        delta = (out * gradients).sum(axis=1)
        lses = np.where(read >= 0, _rows(lse, heads, read, head, member, tile.size)[:, 0], np.inf)
        sums = np.zeros_like(queries)
        for t in range(tile.first, tile.count):
            seen = tile.seen(m, t, window)
            if seen is None:
                continue
            keys, values = (_rows(a, heads, tile.keys(t), head, np.zeros(1, int), 1) for a in (k, v))
            p = np.exp(np.where(seen, queries @ keys.T * scale - lses[:, None], -np.inf))
            sums += (p * (gradients @ values.T - delta[:, None])) @ keys
        index = (tokens * heads + head) * tile.size + member
        for row in np.flatnonzero(tokens >= 0):
            outputs[0].reshape(-1, q.shape[-1])[index[row]] = sums[row] * scale
            outputs[1].reshape(-1)[index[row]] = delta[row]


def _keys(
    c: Constants, arrays: Arrays, outputs: Arrays, x: int, head: int, heads: int, window: int, scale: float
) -> None:
    q, k, v, gradient, lse, delta, tiles, visits, k_partials, v_partials = arrays
    size, columns, warp_rows = c["REPEATS"], c["COLUMNS"], 16 * c["FRAGMENTS"]
    start, length, first, count = (int(number) for number in tiles[x])
    if count < 0:
        assert not c["PARTIAL"]
        for output, partials in zip(outputs, (k_partials, v_partials), strict=True):
            output[start : start + length, head] = partials[first : first - count, head, :length].sum(axis=0)
        return
    for warp_row in range(0, warp_rows * c["WARPS"], warp_rows):
        own = warp_row + np.arange(warp_rows)
        tokens = np.where(own < length, start + own, -1)
        keys, values = (_rows(a, heads, tokens, head, np.zeros(1, int), 1) for a in (k, v))
        k_sums, v_sums = np.zeros_like(keys), np.zeros_like(values)
        last_key = min(warp_row + warp_rows, length) - 1
        for begin, more, distance, _ in visits[first : first + count].tolist():
            rows = min(more, window - distance + length - 1) * size
            for step in range(-(-rows // columns) if rows > 0 else 0):
                m = step * columns + np.arange(columns)
                nearest = distance + m[0] // size
                farthest = distance + (min(m[0] + columns, rows) - 1) // size
                if not (warp_row < length and farthest >= warp_row and nearest - last_key < window):
                    continue
                read, member = np.where(m < rows, begin + m // size, -1), m % size
                queries, gradients = (_rows(a, heads, read, head, member, size) for a in (q, gradient))
                lses, deltas = (_rows(a, heads, read, head, member, size)[:, 0] for a in (lse, delta))
                away = distance + m // size - own[:, None]
                seen = (away >= 0) & (away < window) & (m < rows)
                if nearest >= last_key and farthest - warp_row < window and m[0] + columns <= rows:
                    seen = np.ones_like(seen)
                p = np.exp(np.where(seen, keys @ queries.T * scale - lses, -np.inf))
                v_sums += p @ gradients
                k_sums += (p * (values @ gradients.T - deltas)) @ queries
        for output, sums in zip(outputs, (k_sums * scale, v_sums), strict=True):
            for row in np.flatnonzero(tokens >= 0):
                if c["PARTIAL"]:
                    output[x, head, own[row]] = sums[row]
                else:
                    output[tokens[row], head] = sums[row]
