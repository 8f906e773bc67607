"""Attention with one order of reduction, so that decoding and training compute the same numbers.

mlx-lm's models call the `scaled_dot_product_attention` of their module; `install_attention` puts `attention` in its
place for our own caches, and leaves mlx-lm's caches to mlx-lm.

On a CPU a product's result can depend on its shape: BLAS libraries take other kernels for fewer than four rows (MKL
2026.2 on an AMD EPYC: also for fewer than twelve columns), and cut a long inner dimension where its length suggests.
Here there are never fewer rows or columns, and the inner dimension is cut every 192 positions, whoever asks. Other
places that multiply keep to `MIN_ROWS` too.

Axes: B rows, H key-value heads, R query heads per key-value head, T queries, L positions, D head size.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as mlx_lm_base

from parallm.model.exponentials import softmax

MIN_ROWS = 4
MIN_COLUMNS = 16
KEY_BLOCK = 192

_mlx_lm_attention = mlx_lm_base.scaled_dot_product_attention


class OwnCache:
    """Marks the caches whose attention is computed here."""

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
        """What a layer with this cache computes; `mask` is what the cache's own `make_mask` gave."""
        return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def install_attention(model: nn.Module) -> None:
    """Let the modules that define `model`'s layers call `_dispatch`. Changes mlx-lm's modules; safe to repeat."""
    for name in {type(module).__module__ for module in model.modules()}:
        if getattr(sys.modules[name], "scaled_dot_product_attention", None) is _mlx_lm_attention:
            sys.modules[name].scaled_dot_product_attention = _dispatch  # type: ignore[attr-defined]


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Softmax attention; queries (B, H*R, T, D), keys and values (B, H, L, D) -> (B, H*R, T, D).

    `mask` is None, "causal" (the last query sees all positions), or an array, true where visible or added to scores.
    `sinks` are logits, one per query head, that take part in the softmax and carry no value.
    """
    if mx.default_device() != mx.Device(mx.cpu) or queries.dtype != mx.float32 or sinks is not None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    rows, heads, length, size = queries.shape[0], keys.shape[1], queries.shape[2], queries.shape[3]
    repeats, positions = queries.shape[1] // heads, keys.shape[2]
    grouped = (queries * scale).reshape(rows, heads, repeats * length, size)
    columns = _at_least(keys, 2, MIN_COLUMNS).swapaxes(-1, -2)
    scores = product(grouped, columns)[..., :positions].reshape(rows, heads, repeats, length, positions)
    weights = softmax(_masked(scores, mask)).reshape(rows, heads, repeats * length, positions)
    blocks = [slice(start, start + KEY_BLOCK) for start in range(0, positions, KEY_BLOCK)]
    parts = [product(weights[..., block], values[:, :, block]) for block in blocks]
    return sum(parts[1:], parts[0]).reshape(rows, heads * repeats, length, values.shape[-1])


def product(left: mx.array, right: mx.array) -> mx.array:
    """`left @ right` with at least `MIN_ROWS` rows on the left; the extra rows are cut off again."""
    num_rows = left.shape[-2]
    if num_rows >= MIN_ROWS:
        return left @ right
    return (at_least_rows(left, axis=left.ndim - 2) @ right)[..., :num_rows, :]


def at_least_rows(array: mx.array, axis: int) -> mx.array:
    """Repeat `array` along `axis` until it has `MIN_ROWS`."""
    return _at_least(array, axis, MIN_ROWS)


def _at_least(array: mx.array, axis: int, least: int) -> mx.array:
    size = array.shape[axis]
    return array if size >= least else mx.concatenate([array] * -(-least // size), axis=axis)


def _masked(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """Hide positions in scores (B, H, R, T, L)."""
    if mask is None:
        return scores
    length, positions = scores.shape[-2:]
    if isinstance(mask, str):
        visible = mx.arange(positions - length, positions)[:, None] >= mx.arange(positions)[None]
        return mx.where(visible, scores, -mx.inf)
    grouped: mx.array = mask
    if mask.ndim == 4:  # (B, heads, T, L): a mask for each query head, or the same for all
        heads = scores.shape[1:3] if mask.shape[1] > 1 else (1, 1)
        grouped = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
    return mx.where(grouped, scores, -mx.inf) if grouped.dtype == mx.bool_ else scores + grouped


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands in for mlx-lm's function of the same signature."""
    if isinstance(cache, OwnCache):
        return cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    result: mx.array = _mlx_lm_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return result
