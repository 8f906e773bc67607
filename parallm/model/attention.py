"""Attention with one order of reduction, so that decoding and training compute the same numbers.

`patches/forward.py` lets mlx-lm's models call it. On a CPU a product's result can depend on its shape: BLAS libraries
take other kernels for fewer than four rows (MKL 2026.2 on an AMD EPYC: also for fewer than twelve columns), and split a
long inner dimension where its length suggests. Here there are never fewer rows or columns, and the inner dimension is
split every 192 positions for every caller. Other products keep to `MIN_ROWS` too.

Axes: B rows, H key-value heads, R query heads per key-value head, T queries, L positions, D head size.
"""

import mlx.core as mx

from parallm.model.logprobs import softmax

MIN_ROWS = 4
MIN_COLUMNS = 16
KEY_BLOCK = 192


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


def _at_least(array: mx.array, axis: int, size: int) -> mx.array:
    present = array.shape[axis]
    return array if present >= size else mx.concatenate([array] * -(-size // present), axis=axis)


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
