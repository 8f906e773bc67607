"""The list of a trunk's layers, exchanged while a graph is built.

The last layer can be computed for the tokens that are read: after its attention no tokens mix, so others need no MLP.

Axes: M computed tokens, each a row of one; N tokens that are read, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.gather import take_rows
from parallm.model.lora.linear import LoraBinding
from parallm.model.shared_model import SharedModel

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""The modules of a layer that can be computed for some tokens."""
TRIAL_TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
READ = [2, 3, 5, 7]
"""Places of the trial's tokens that are read."""
MAX_DIFFERENCE, MAX_DIFFERENCE_16_BITS = 1e-3, 5e-3
"""Allowed between hidden states, relative: products of fewer rows may round in another way. A residual that is
multiplied by 0.99 makes 0.01."""


def has_layers(model: SharedModel) -> bool:
    """Whether the trunk has its layers in a list of its own, which can be exchanged."""
    return isinstance(model.trunk.get("layers"), list)


@contextmanager
def replaced_layers(model: SharedModel, layers: list[Any]) -> Iterator[None]:
    """Inside the block the trunk has these layers."""
    trunk = model.trunk
    own_layers, trunk.layers = trunk.layers, layers
    try:
        yield
    finally:
        trunk.layers = own_layers


@contextmanager
def trimmed_last_layer(
    model: SharedModel, choose: Callable[[mx.array], mx.array], lora: LoraBinding | None = None
) -> Iterator[None]:
    """Inside the block the last layer of a model that `can_trim` ends with the tokens of `choose`, (M, H) -> (N, H).

    `lora` is the binding of these tokens; None: that of all, which does not know them by their places.
    """
    *layers, last = model.trunk.layers
    applied = nullcontext if lora is None else partial(model.lora_context.applied, lora)
    with replaced_layers(model, [*layers, _TrimmedLayer(last, choose, applied)]):
        yield


def can_trim(model: SharedModel, forward: Callable[[mx.array], mx.array]) -> bool:
    """Whether the last layer is x + attention(norm(x)), then + mlp(norm(..)): tried with a few tokens. `forward`: their
    hidden states (M, H), of tokens (M,)."""
    if not has_layers(model) or not all(hasattr(model.trunk.layers[-1], name) for name in PARTS):
        return False
    tokens_M, read_N = mx.array(TRIAL_TOKENS), mx.array(READ)

    def choose(hidden_MH: mx.array) -> mx.array:
        assert hidden_MH.shape[0] >= len(TRIAL_TOKENS), "a layer that runs again gets what it left"
        return take_rows(hidden_MH, read_N)

    try:
        expected_NH = choose(forward(tokens_M)).astype(mx.float32)
        with trimmed_last_layer(model, choose):
            found_NH = forward(tokens_M)[: len(READ)]
        difference = mx.linalg.norm(found_NH - expected_NH)
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError):  # layers that expect something else
        return False
    allowed = MAX_DIFFERENCE if model.dtype == mx.float32 else MAX_DIFFERENCE_16_BITS
    return bool((difference < allowed * mx.linalg.norm(expected_NH)).item())


@dataclass(frozen=True, slots=True)
class _TrimmedLayer:
    layer: nn.Module
    choose: Callable[[mx.array], mx.array]
    applied: Callable[[], AbstractContextManager[None]]
    """In its block the targets apply the LoRA of the tokens that are chosen."""

    def __call__(self, x_M1H: mx.array, *arguments: Any, **options: Any) -> mx.array:
        attention, norm = self.layer.self_attn, self.layer.input_layernorm
        attended_M1H = x_M1H + attention(norm(x_M1H), *arguments, **options)
        chosen_N1H = self.choose(attended_M1H[:, 0])[:, None]
        with self.applied():
            result: mx.array = chosen_N1H + self.layer.mlp(self.layer.post_attention_layernorm(chosen_N1H))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)
