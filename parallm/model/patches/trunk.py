"""The split of an mlx-lm model in trunk (tokens -> hidden states) and head (hidden states -> logits).

mlx-lm's models call `self.model(inputs, cache)` (or transformer, backbone; multimodal ones under language_model) and
then the head. Whether the split reproduces the whole forward to the bit is checked when a model is loaded.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

TRUNK_NAMES = ("model", "transformer", "backbone")


def find_trunk(base: nn.Module) -> tuple[nn.Module | None, str]:
    """The module that owns the trunk, and the trunk's name in it; None where there is none."""
    owner = getattr(base, "language_model", base)
    for name in TRUNK_NAMES:
        if isinstance(getattr(owner, name, None), nn.Module):
            return owner, name
    return None, ""


class Replay:
    """Stands in for the trunk while the head runs: gives hidden states that are already known."""

    def __init__(self, trunk: nn.Module, hidden_BTH: mx.array) -> None:
        self._trunk = trunk
        self._hidden_BTH = hidden_BTH

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._hidden_BTH

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)
