"""The order in which mlx-lm computes the chosen experts of many tokens, as LoRA needs it.

From 64 rows on `SwitchGLU` and `SwitchMLP` sort the rows of a product by expert, and hand their layers no more than
the sorted indices. Rows of several adapter versions need to know whose row each is.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import switch_layers

from parallm.model.patches.forward import set_origin

_mlx_lm_sort = switch_layers._gather_sort


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedExperts:
    """Origin of expert indices (N,) in their own order."""

    tokens_N: mx.array
    """The token that each index was chosen for, counted over all rows of the forward."""
    num_tokens: int


def install_experts() -> None:
    """Let mlx-lm's mixtures sort with `sort_by_expert`. Changes mlx-lm's module; safe to repeat."""
    switch_layers._gather_sort = sort_by_expert


def sort_by_expert(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs in the order of their experts, the experts, and the order that puts results back.

    Stands in for mlx-lm's function of the same signature; the experts know their tokens (`SortedExperts`).
    """
    sorted_x, experts_N, inverse_N = _mlx_lm_sort(x, indices)
    chosen = indices.shape[-1]
    tokens_N = mx.argsort(inverse_N) // chosen
    set_origin(experts_N, SortedExperts(tokens_N=tokens_N, num_tokens=indices.size // chosen))
    return sorted_x, experts_N, inverse_N
