"""The loss of reward models on pairs of completions. Axes: P pairs."""

import mlx.core as mx


def pair_loss(chosen_P: mx.array, rejected_P: mx.array, margin_P: mx.array, *, center: float) -> mx.array:
    """-log sigmoid(chosen - rejected - margin) of each pair, its negative log-likelihood after Bradley and Terry, (P,).

    As in equation 1 of https://arxiv.org/abs/2009.01325. Only differences count for it, so scores may drift; `center`
    times the square of a pair's summed scores holds them near zero (equation 2 of https://arxiv.org/abs/2312.09244).
    """
    # this form neither overflows nor loses the digits of a small loss
    losses_P = mx.logaddexp(0.0, rejected_P + margin_P - chosen_P)
    return losses_P + center * (chosen_P + rejected_P) ** 2
