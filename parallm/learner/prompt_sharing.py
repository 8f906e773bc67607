"""Caches that let several completions share one prompt inside a differentiable forward.

The prompt's pass leaves its keys and values in `PromptLayer`s; the completions' pass reads them through
`ContinuationLayer`s. Gradients flow back into the prompt's pass. Both speak the interface of mlx-lm's caches.

Axes: G completions, H key-value heads, P prompt tokens, T completion tokens, D head size.
"""

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from parallm.model.attention import OwnCache


class PromptLayer(OwnCache):
    """Keeps one layer's keys and values of the prompt, (1, H, P, D)."""

    offset = 0

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> object:
        return create_attention_mask(length, 0, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values


class ContinuationLayer(OwnCache):
    """Puts the prompt's keys and values before those of each completion."""

    def __init__(self, prompt: PromptLayer) -> None:
        assert prompt.keys is not None, "the prompt's pass comes first"
        assert prompt.values is not None
        self._keys, self._values = prompt.keys, prompt.values
        self.offset = prompt.keys.shape[2]

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> object:
        return create_attention_mask(length, self.offset, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys_GHTD: mx.array, values_GHTD: mx.array) -> tuple[mx.array, mx.array]:
        return _behind(self._keys, keys_GHTD), _behind(self._values, values_GHTD)


def _behind(shared_1HPD: mx.array, own_GHTD: mx.array) -> mx.array:
    repeated = mx.broadcast_to(shared_1HPD, (own_GHTD.shape[0], *shared_1HPD.shape[1:]))
    return mx.concatenate([repeated, own_GHTD], axis=2)
