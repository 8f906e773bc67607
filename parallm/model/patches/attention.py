"""Puts our attention in the place of mlx-lm's, for caches of our own; mlx-lm's caches keep mlx-lm's."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as mlx_lm_base

from parallm.model.attention import attention

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
        """A layer's attention with this cache; `mask` comes from the cache's own `make_mask`."""
        return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def install_attention(model: nn.Module) -> None:
    """Let the modules that define `model`'s layers call `_dispatch`. Changes mlx-lm's modules; safe to repeat."""
    for name in {type(module).__module__ for module in model.modules()}:
        if getattr(sys.modules[name], "scaled_dot_product_attention", None) is _mlx_lm_attention:
            sys.modules[name].scaled_dot_product_attention = _dispatch  # type: ignore[attr-defined]


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
