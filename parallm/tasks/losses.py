"""Losses of vectors and labels. Those of a step are summed, so that a float16 base keeps small gradients.

Axes: P pairs, C candidate documents, D numbers of a vector, N texts, L labels.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from parallm.model.attention import product

MIN_LENGTH = 1e-12
"""Vectors are divided by their length or this, as torch does it."""


def info_nce(anchors_PD: mx.array, documents_CD: mx.array, hidden_PC: mx.array, *, scale: float) -> mx.array:
    """InfoNCE of each pair, (P,), float32: the cross-entropy of its own document among all, by `scale` x cosine.

    Documents are the pairs' own in their order, then hard negatives. `hidden_PC` is True for documents that are left
    out: copies of a right one. Equation 1 of https://arxiv.org/abs/1705.00652, with the cosine of
    https://arxiv.org/abs/1807.03748's form.
    """
    scores_PC = mx.where(hidden_PC, -mx.inf, scale * cosines(anchors_PD, documents_CD))
    return mx.logsumexp(scores_PC, axis=1) - mx.diagonal(scores_PC)


def cosines(anchors_PD: mx.array, documents_CD: mx.array) -> mx.array:
    """Cosines (P, C), float32."""
    return product(_normalized(anchors_PD), _normalized(documents_CD).T)


def matryoshka(
    anchors_PD: mx.array, documents_CD: mx.array, hidden_PC: mx.array, *, scale: float, dimensions: Sequence[int]
) -> mx.array:
    """The sum of `info_nce` of the vectors and of their first numbers, cut to each of `dimensions`, (P,).

    Equation 1 of https://arxiv.org/abs/2205.13147 with weights of 1.
    """
    sizes = sorted({*dimensions, anchors_PD.shape[1]})
    losses = [info_nce(anchors_PD[:, :size], documents_CD[:, :size], hidden_PC, scale=scale) for size in sizes]
    return sum(losses[1:], losses[0])


def cross_entropy(logits_NL: mx.array, labels_N: mx.array) -> mx.array:
    """Cross-entropy of one label of several, (N,)."""
    return nn.losses.cross_entropy(logits_NL, labels_N)


def binary_cross_entropy(logits_NL: mx.array, targets_NL: mx.array) -> mx.array:
    """Mean over the labels of the cross-entropy of each one's sigmoid and its target from 0 to 1, (N,)."""
    return (mx.logaddexp(0.0, logits_NL) - targets_NL * logits_NL).mean(axis=1)


def _normalized(vectors_ND: mx.array) -> mx.array:
    squares_N1 = mx.square(vectors_ND.astype(mx.float32)).sum(axis=1, keepdims=True)
    return vectors_ND * mx.rsqrt(mx.maximum(squares_N1, MIN_LENGTH**2))
