"""The gated delta rule (https://arxiv.org/abs/2412.06464) in chunks, with its own backward.

    S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T        o_t = S_t q_t

The gate a_t is one number per head, or one per key channel (Kimi Delta Attention, https://arxiv.org/abs/2510.26692). In
a chunk with G_t the sum of log a up to t, and D_ti = exp(G_t - G_i):

    L = tril(b_t D_ti (k_t . k_i), -1)        V, W = (I + L)^-1 (b v), (I + L)^-1 (b exp(G) k)
    P = tril(D_ti (q_t . k_i))        Q = exp(G) q        K = exp(G_C - G) k        g = exp(G_C)

which `scan` takes; with a gate per head CUDA kernels do the same (`kernels/delta_chunks.py`). Gradients reach gates
through log a, which are finite where a is zero.

Axes: M tokens, R rows, N chunks, C tokens of a chunk, Hk, Hv key and value heads, J value heads per key head, Dk, Dv
head sizes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np

from parallm.model.kernels import delta_chunks
from parallm.model.kernels import unit_lower_inverse as inverse_kernel
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.unit_lower_inverse import unit_lower_inverse
from parallm.model.recurrence.rows import Chunks, PackedRows, Stage
from parallm.model.recurrence.scan import Decay, Terms, recurrence, sum_branches

CPU_CHUNK, GPU_CHUNK = 32, 64
"""Tokens of a chunk. On a CPU 32 is fastest (1 head of 128); tensor cores want 64."""
CHANNEL_CHUNK = 16
"""The same with a gate per key channel, whose products are sums over (C, C, Dk) numbers."""


def gated_delta(
    q_MKD: mx.array,
    k_MKD: mx.array,
    v_MVD: mx.array,
    log_a_MV: mx.array,
    b_MV: mx.array,
    initial_RVDK: mx.array | None,
    rows: PackedRows,
) -> tuple[mx.array, mx.array]:
    """Outputs (M, Hv, Dv) of v's dtype, and the float32 states (R, Hv, Dv, Dk) after the rows that continue no other.

    q, k (M, Hk, Dk), v (M, Hv, Dv), b (M, Hv), log a (M, Hv) or (M, Hv, Dk), at most 0; the key head of value head h is
    h // (Hv // Hk). The initial states of the same rows are zero by default. Chunks and states are float32.
    """
    size = CHANNEL_CHUNK if log_a_MV.ndim == 3 else GPU_CHUNK if on_cuda() else CPU_CHUNK
    inputs = [q_MKD, k_MKD, v_MVD, log_a_MV, b_MV]
    if delta_chunks.fits(inputs, size):
        return gated_delta_by_kernels(inputs, initial_RVDK, rows.chunks(size))
    if initial_RVDK is None:
        initial_RVDK = mx.zeros((len(rows.starting), *v_MVD.shape[1:], k_MKD.shape[-1]))
    outputs_MVD, last_RVDK = recurrence(_terms, inputs, initial_RVDK, rows.chunks(size))
    return outputs_MVD.astype(v_MVD.dtype), last_RVDK


def gated_delta_by_kernels(
    inputs: Sequence[mx.array], initial_RVDK: mx.array | None, chunks: Chunks
) -> tuple[mx.array, mx.array]:
    """The same by kernels for whole chunks, of inputs that fit them. The backward keeps the inputs alone, as that of
    `recurrence` does."""
    starting, continuing = chunks.starting, chunks.continuing
    ranks = starting.ranks.tolist()
    parents = [ranks[place] for place in chunks.parents]
    branches = range(len(parents))

    def rows_of(stage: Stage, origins: Sequence[int], targets: Sequence[int]) -> delta_chunks.Rows:
        return delta_chunks.Rows(counts=stage.counts, first=stage.first, origins=origins, targets=targets)

    def given(arrays: Sequence[mx.array]) -> delta_chunks.Inputs:
        q, k, v, log_a, b = arrays
        return delta_chunks.Inputs(
            q_MKD=q,
            k_MKD=k,
            v_MHD=v,
            log_a_MH=log_a,
            b_MH=b,
            tokens_NC=chunks.tokens,
            num_chunks=chunks.num_chunks,
        )

    def scanned(
        arrays: delta_chunks.Inputs, terms: delta_chunks.Terms, initial: mx.array | None
    ) -> tuple[delta_chunks.Scanned, mx.array]:
        origins = [-1] * len(ranks) if initial is None else ranks
        first, last = delta_chunks.delta_scan(arrays, terms, initial, rows_of(starting, origins, ranks))
        if not parents:
            return first, last
        second, _ = delta_chunks.delta_scan(arrays, terms, last, rows_of(continuing, parents, branches))
        return joined(first, second), last

    def joined(first: delta_chunks.Scanned, second: delta_chunks.Scanned) -> delta_chunks.Scanned:
        pairs = (first.states, second.states), (first.deltas, second.deltas)
        return delta_chunks.Scanned(*(mx.concatenate(pair) for pair in pairs))

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        arrays = given(arguments[:5])
        terms = delta_chunks.delta_terms(arrays)
        states, last = scanned(arrays, terms, *(arguments[5:] or [None]))
        return delta_chunks.delta_outputs(arrays, terms, states), last

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(arguments: list[mx.array], cotangents: list[mx.array], _: object) -> tuple[mx.array, ...]:
        slopes, of_last = cotangents
        arrays = given(arguments[:5])
        back = delta_chunks.delta_terms_back(arrays, slopes)
        states, _ = scanned(arrays, back.terms, *(arguments[5:] or [None]))
        passed = replace(back.terms, values=back.within)
        second = None
        if parents:
            rows = rows_of(continuing, [-1] * len(parents), branches)
            second, of_branches = delta_chunks.delta_scan(arrays, passed, None, rows, slopes)
            of_last = of_last + sum_branches(of_branches, np.asarray(parents, np.int32), len(ranks))
        rows = rows_of(starting, ranks, ranks)
        first, of_initial = delta_chunks.delta_scan(arrays, passed, of_last, rows, slopes)
        of_states = first if second is None else joined(first, second)
        of_inputs = delta_chunks.delta_gradient(arrays, slopes, back, states, of_states)
        return (*of_inputs, *([of_initial] if len(arguments) > 5 else []))

    # float32 from here on, so that the gradient of an initial state is cast as the state is
    initial = [] if initial_RVDK is None else [initial_RVDK.astype(mx.float32)]
    outputs_MVD, last_RVDK = forward(*inputs, *initial)
    return outputs_MVD, last_RVDK


def _terms(q: mx.array, k: mx.array, v: mx.array, log_a: mx.array, b: mx.array) -> Terms:
    """The terms of a scan from chunks (N, C, H, ..) of the inputs."""
    num_chunks, size, key_heads, _ = k.shape
    per_key = v.shape[2] // key_heads

    def by_head(array: mx.array) -> mx.array:
        """(N, C, Hv, ..) -> (N, Hk, J, C, ..)"""
        return array.reshape(num_chunks, size, key_heads, per_key, -1).transpose(0, 2, 3, 1, 4)

    q, k = (array.transpose(0, 2, 1, 3)[:, :, None] for array in (q, k))  # (N, Hk, 1, C, Dk)
    v, log_a, b = by_head(v), by_head(log_a), by_head(b)
    decay = Decay(log_a)  # (N, Hk, J, C, 1 or Dk)
    from_start = decay.from_start()
    of_keys, of_queries = _decayed_products(q, k, decay.between())
    removed = b * from_start * k
    solved = _solve(b * of_keys, mx.concatenate([b * v, removed], axis=-1))

    def flat(array: mx.array) -> mx.array:
        return array.reshape(num_chunks, key_heads * per_key, *array.shape[3:])

    return Terms(
        values=flat(solved[..., : v.shape[-1]]),
        removals=flat(solved[..., v.shape[-1] :]),
        readouts=flat(from_start * q),
        updates=flat(decay.to_end() * k),
        inner=flat(of_queries),
        decay=flat(from_start[..., -1:, :]),
    )


def _decayed_products(q: mx.array, k: mx.array, between: mx.array) -> tuple[mx.array, mx.array]:
    """Products of keys, and of queries, with the keys up to their own, times the decay between: (N, Hk, J, C, C)."""
    if between.ndim == k.ndim:
        return between * (k @ k.swapaxes(-1, -2)), between * (q @ k.swapaxes(-1, -2))
    decayed = between * k[..., None, :, :]  # (N, Hk, J, C, C, Dk)
    of_keys, of_queries = ((decayed * rows[..., :, None, :]).sum(axis=-1) for rows in (k, q))
    return of_keys, of_queries


def _solve(products: mx.array, right: mx.array) -> mx.array:
    """(I + L)^-1 right, with L the part of `products` below its diagonal."""
    solution: mx.array = _solved(products, right)[0]
    return solution


@mx.custom_function  # type: ignore[untyped-decorator]
def _solved(products: mx.array, right: mx.array) -> tuple[mx.array, mx.array]:
    inverse = inverse_unit_lower(products)
    return inverse @ right, inverse


@_solved.vjp  # type: ignore[untyped-decorator]
def _solved_gradient(
    inputs: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
) -> tuple[mx.array, mx.array]:
    solution, inverse = outputs
    of_right = inverse.swapaxes(-1, -2) @ cotangents[0]
    return -mx.tril(of_right @ solution.swapaxes(-1, -2), -1), of_right


def inverse_unit_lower(products: mx.array) -> mx.array:
    """(I + L)^-1, with L the part of `products` (.., C, C) below its diagonal.

    By substitution in a kernel, or on a CPU in LAPACK; elsewhere by merging the inverses of blocks on the diagonal,
    which is as stable. Powers of L overflow if keys repeat."""
    if inverse_kernel.fits(products):
        return unit_lower_inverse(products)
    lower = mx.tril(products, -1)
    if mx.default_device() == mx.Device(mx.cpu):
        return mx.linalg.tri_inv(lower + mx.eye(lower.shape[-1]))
    return merged_inverse(lower)


def merged_inverse(lower: mx.array) -> mx.array:
    """The same of L, by merging blocks."""
    size = lower.shape[-1]
    inverse = mx.broadcast_to(mx.eye(size), lower.shape)
    for block, corner in enumerate(_corners(size)):
        below = mx.where(corner, lower, 0)
        inverse = inverse - (below if block == 0 else inverse @ below @ inverse)
    return inverse


@cache
def _corners(size: int) -> tuple[mx.array, ...]:
    """The corners (C, C) below both blocks of each pair of 1, 2, 4 .. tokens on the diagonal."""
    places = np.arange(size)
    corners = []
    block = 1
    while block < size:
        of_pair, of_block = places // (2 * block), places // block
        corners.append(mx.array((of_pair[:, None] == of_pair) & (of_block[:, None] > of_block)))
        block *= 2
    return tuple(corners)


def gated_delta_step(
    q_BGK: mx.array, k_BGK: mx.array, v_BHV: mx.array, g: mx.array, beta_BH: mx.array, state_BHVK: mx.array
) -> tuple[mx.array, mx.array]:
    """One token of each of B rows: outputs (B, H, V) in the type of the queries, and the state after the token.

    `g` is the decay of each head, (B, H), or of each of its key channels, (B, H, K). Each of the G heads of keys and
    queries is that of H / G heads of values. As g S q + u (k . q) = S' q, the state is read before it changes, for keys
    and queries by one product. On a CPU the sum with the decayed state is part of a product, too, which takes its place
    in memory; GPUs may round what they multiply. Nothing is compiled for a number of rows.
    """
    rows, heads, width, size = state_BHVK.shape
    per_key = heads // k_BGK.shape[1]
    inner_BH1 = mx.repeat((k_BGK * q_BGK).sum(axis=-1), per_key, axis=1)[..., None]
    asked = mx.stack([k_BGK, q_BGK], axis=2)  # (B, G, 2, K)
    if g.ndim == beta_BH.ndim:
        # heads that share a key are one matrix
        joined = state_BHVK.reshape(rows, -1, per_key * width, size)
        reads = (asked @ joined.swapaxes(-1, -2)).reshape(rows, -1, 2, per_key, width)
        read_BHV, seen_BHV = (reads[:, :, index].reshape(rows, heads, width) * g[..., None] for index in (0, 1))
        decayed_BHVK = state_BHVK * g[..., None, None]
    else:
        reads = (mx.repeat(asked, per_key, axis=1) * g[:, :, None]) @ state_BHVK.swapaxes(-1, -2)
        read_BHV, seen_BHV = reads[:, :, 0], reads[:, :, 1]
        decayed_BHVK = state_BHVK * g[..., None, :]
    written_BHV = (v_BHV - read_BHV) * beta_BH[..., None]
    outputs_BHV = seen_BHV + written_BHV * inner_BH1
    columns, keys = written_BHV.reshape(rows, -1, per_key * width, 1), k_BGK[:, :, None]
    decayed = decayed_BHVK.reshape(rows, -1, per_key * width, size)
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    changed = mx.addmm(decayed, columns, keys) if is_on_cpu else decayed + columns * keys
    return outputs_BHV.astype(q_BGK.dtype), changed.reshape(state_BHVK.shape)
