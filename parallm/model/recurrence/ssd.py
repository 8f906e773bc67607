"""The state space dual of Mamba-2 (https://arxiv.org/abs/2405.21060) in chunks, with its own backward.

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = S_t C_t

In a chunk with G_t the sum of log a up to t: P = tril(exp(G_t - G_i) (C_t . B_i)), V = x, Q = exp(G) C, K =
exp(G_C - G) B and g = exp(G_C), which `scan` takes.

Axes: M tokens, R rows, N chunks, T tokens of a chunk, H heads, G groups of heads, J heads of a group, D head size, S
state size.
"""

import mlx.core as mx

from parallm.model.recurrence.rows import PackedRows
from parallm.model.recurrence.scan import Decay, Terms, recurrence

CHUNK = 64


def ssd(
    x_MHD: mx.array,
    log_a_MH: mx.array,
    B_MGS: mx.array,
    C_MGS: mx.array,
    initial_RHDS: mx.array | None,
    rows: PackedRows,
) -> tuple[mx.array, mx.array]:
    """Outputs (M, H, D), float32, and the float32 states (R, H, D, S) after the rows that continue no other.

    x (M, H, D), log a (M, H), at most 0, B and C (M, G, S); the group of head h is h // (H // G). The initial states of
    the same rows are zero by default.
    """
    if initial_RHDS is None:
        initial_RHDS = mx.zeros((len(rows.starting), *x_MHD.shape[1:], B_MGS.shape[-1]))
    return recurrence(_terms, [x_MHD, log_a_MH, B_MGS, C_MGS], initial_RHDS, rows.chunks(CHUNK))


def _terms(x: mx.array, log_a: mx.array, B: mx.array, C: mx.array) -> Terms:
    """The terms of a scan from chunks (N, T, H, ..) of the inputs."""
    num_chunks, size, groups, _ = B.shape
    per_group = x.shape[2] // groups

    def by_head(array: mx.array) -> mx.array:
        """(N, T, H, ..) -> (N, G, J, T, ..)"""
        return array.reshape(num_chunks, size, groups, per_group, -1).transpose(0, 2, 3, 1, 4)

    def flat(array: mx.array) -> mx.array:
        return array.reshape(num_chunks, groups * per_group, *array.shape[3:])

    B, C = (array.transpose(0, 2, 1, 3)[:, :, None] for array in (B, C))  # (N, G, 1, T, S)
    decay = Decay(by_head(log_a))  # (N, G, J, T, 1)
    from_start = decay.from_start()
    return Terms(
        values=flat(by_head(x)),
        readouts=flat(from_start * C),
        updates=flat(decay.to_end() * B),
        inner=flat(decay.between() * (C @ B.swapaxes(-1, -2))),
        decay=flat(from_start[..., -1:, :]),
    )
