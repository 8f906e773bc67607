"""Keys and values of all layers in one array where their shapes allow it, so that copying them takes few operations.

Axes: N layers' keys and values, B rows, H key-value heads, T positions, D head size.
"""

from collections.abc import Sequence

import mlx.core as mx


def row_copies(layers_1HTD: Sequence[mx.array]) -> list[mx.array]:
    """A copy of one row's keys and values, (N, H, T, D); or of each array, N = 1, where they are not alike."""
    if _are_alike(layers_1HTD):
        return [mx.concatenate(list(layers_1HTD))]
    return [mx.contiguous(array) for array in layers_1HTD]


def stacks_of(layers_BHTD: Sequence[mx.array]) -> list[mx.array]:
    """Keys and values of several rows, (N, B, H, T, D), as `row_copies` has those of one row."""
    return [mx.stack(list(layers_BHTD))] if _are_alike(layers_BHTD) else [array[None] for array in layers_BHTD]


def layers_of(rows: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """Keys and values of each layer in turn, (B, H, T, D), of rows that `row_copies` made."""
    stacks = [mx.stack(list(copies), axis=1) for copies in zip(*rows, strict=True)]
    return [stack[layer] for stack in stacks for layer in range(stack.shape[0])]


def _are_alike(arrays: Sequence[mx.array]) -> bool:
    return all(array.shape == arrays[0].shape and array.dtype == arrays[0].dtype for array in arrays)
