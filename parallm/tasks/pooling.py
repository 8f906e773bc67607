"""Hidden states of a text's tokens -> one vector, as sentence-transformers' Pooling does it.

Axes: M tokens of all texts one after the other, T tokens of a text, S texts, H hidden, D numbers of a vector.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from parallm.types import Pooling


def pool(hidden_MH: mx.array, lengths: Sequence[int], modes: Sequence[Pooling]) -> mx.array:
    """Vectors (S, D), float32, of texts with these numbers of tokens; several modes give D = modes x H."""
    starts = list(accumulate(lengths, initial=0))
    return mx.concatenate([_pool(hidden_MH, starts, mode) for mode in modes], axis=1)


def _pool(hidden_MH: mx.array, starts: Sequence[int], mode: Pooling) -> mx.array:
    if mode == "cls":
        return hidden_MH[mx.array(starts[:-1])].astype(mx.float32)
    if mode == "last":
        return hidden_MH[mx.array(starts[1:]) - 1].astype(mx.float32)
    # text by text: the sum over one does not depend on the texts beside it
    texts = [hidden_MH[start:end].astype(mx.float32) for start, end in pairwise(starts)]
    if mode == "mean":
        return mx.stack([text_TH.mean(axis=0) for text_TH in texts])
    if mode == "max":
        return mx.stack([text_TH.max(axis=0) for text_TH in texts])
    if mode == "mean_sqrt_len":
        return mx.stack([text_TH.sum(axis=0) / len(text_TH) ** 0.5 for text_TH in texts])
    assert mode == "weighted_mean", mode
    return mx.stack([_weighted_mean(text_TH) for text_TH in texts])


def _weighted_mean(text_TH: mx.array) -> mx.array:
    """Mean with the weights 1, 2, 3, ..., as in https://arxiv.org/abs/2202.08904."""
    weights_T1 = mx.arange(1, len(text_TH) + 1).astype(mx.float32)[:, None]
    return (text_TH * weights_T1).sum(axis=0) / weights_T1.sum()
