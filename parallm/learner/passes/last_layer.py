"""The last layer for trained tokens only. `PolicyGradient` calls it.

After the last attention no tokens mix, so prompts need neither the last MLP nor its gradient. With prompts as long as
completions that saves 1% of an 8B model's update, more for smaller models or longer prompts.

Axes: M computed tokens, N trained tokens, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.learner.passes.checkpointing import can_checkpoint, replaced_layers
from parallm.learner.passes.packing import Segment, num_padding_rows, packed_hidden, padded_hidden
from parallm.model.lora.linear import LoraBinding
from parallm.model.shared_model import SharedModel

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def hidden_at(
    model: SharedModel, inputs_M: mx.array, segments: Sequence[Segment], lora: LoraBinding | None, sources_N: mx.array
) -> mx.array:
    """`packed_hidden` at `sources_N`, (N, H), for a model that `can_trim`."""
    num_padding = num_padding_rows(sources_N.size)
    rows_N = mx.concatenate([sources_N, mx.zeros((num_padding,), sources_N.dtype)])
    layers = model.trunk.layers
    # the last layer is not checkpointed: its backward is the first
    with replaced_layers(model, [*layers[:-1], _LastLayer(layers[-1], rows_N)]):
        return padded_hidden(model, inputs_M, segments, lora)[: sources_N.size]


def can_trim(model: SharedModel) -> bool:
    """Whether the last layer is x + attention(norm(x)), then + mlp(norm(..)): tried with a few tokens."""
    if not model.is_batch_invariant or not can_checkpoint(model):
        return False
    if not all(hasattr(model.trunk.layers[-1], name) for name in PARTS):
        return False
    inputs, sources, segments = mx.array([3, 1, 4, 1, 5, 9, 2, 6]), mx.array([2, 3, 5, 7]), [Segment(prompt=8)]
    try:
        expected = packed_hidden(model, inputs, segments, None)[sources]
        trimmed = hidden_at(model, inputs, segments, None, sources)
        difference = mx.linalg.norm((trimmed - expected).astype(mx.float32)) / mx.linalg.norm(expected)
        return float(difference.item()) < (1e-3 if model.dtype == mx.float32 else 3e-2)
    except (AssertionError, AttributeError, TypeError, ValueError):  # as in `can_pack`
        return False


@dataclass(frozen=True, slots=True)
class _LastLayer:
    """Replaces the last layer while a pass is built."""

    layer: nn.Module
    rows_N: mx.array

    def __call__(self, x_M1H: mx.array, *arguments: Any, **options: Any) -> mx.array:
        attention, norm = self.layer.self_attn, self.layer.input_layernorm
        attended_M1H = x_M1H + attention(norm(x_M1H), *arguments, **options)
        chosen_N1H = attended_M1H[self.rows_N]
        result: mx.array = chosen_N1H + self.layer.mlp(self.layer.post_attention_layernorm(chosen_N1H))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)
