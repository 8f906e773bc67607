"""One token of the gated delta rule for each of many rows: the state is read twice and written once.

With the decayed state g S the rule is u = b (v - g S k), S' = g S + u k^T and S' q = g S q + u (k . q), so the state is
multiplied by the key and the query before it changes. Nothing here is compiled for a number of rows.

Axes: B rows, H value heads, V and K channels of values and keys.
"""

import mlx.core as mx


def gated_delta_step(
    q_BHK: mx.array, k_BHK: mx.array, v_BHV: mx.array, g: mx.array, beta_BH: mx.array, state_BHVK: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs (B, H, V) in the type of the queries, and the state after the token.

    `g` is the decay of each head, (B, H), or of each of its key channels, (B, H, K).
    """
    decay = g[..., None, None] if g.ndim == beta_BH.ndim else g[..., None, :]
    key, query = k_BHK[..., None, :], q_BHK[..., None, :]
    read_BHV, seen_BHV = (_product(state_BHVK, decay, row) for row in (key, query))
    written_BHV = (v_BHV - read_BHV) * beta_BH[..., None]
    output_BHV = seen_BHV + written_BHV * (key * query).sum(axis=-1)
    return output_BHV.astype(q_BHK.dtype), state_BHVK * decay + written_BHV[..., None] * key


def _product(state_BHVK: mx.array, decay: mx.array, row_BH1K: mx.array) -> mx.array:
    """The decayed state times a key or query, (B, H, V)."""
    if decay.shape[-1] == 1:
        return (state_BHVK @ row_BH1K.swapaxes(-1, -2))[..., 0] * decay[..., 0]
    return (state_BHVK @ (decay * row_BH1K).swapaxes(-1, -2))[..., 0]
