"""States that pass through chunks, forward and backward; the part of a recurrence that is sequential.

A recurrence with a matrix as its state, in a chunk that begins with the state S (see `gated_delta` and `ssd`):

    U = V - W S^T        O = Q S^T + P U        S' = g S + U^T K

V (C, Dv), W, Q, K (C, Dk) and P (C, C) are known for all chunks before; without W the states are sums. Everything is
float32, and kept for one layer only, while its forward or backward runs.

Axes: M tokens, N chunks, R rows, H heads, C tokens of a chunk, Dk, Dv head sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import mlx.core as mx
import numpy as np

from parallm.model.kernels import chunk_gates as gates_kernel
from parallm.model.kernels import chunk_scan as scan_kernel
from parallm.model.kernels.chunk_gates import chunk_gates
from parallm.model.kernels.chunk_scan import chunk_scan
from parallm.model.logprobs import clipped_exp
from parallm.model.recurrence.rows import Chunks, Indices, Stage, rearranged, taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a scan takes of each chunk, or gradients with respect to these."""

    values: mx.array
    """V (N, H, C, Dv)."""
    readouts: mx.array
    """Q (N, H, C, Dk)."""
    updates: mx.array
    """K (N, H, C, Dk)."""
    inner: mx.array
    """P (N, H, C, C)."""
    decay: mx.array
    """g (N, H, 1, Dk), or (N, H, 1, 1)."""
    removals: mx.array | None = None
    """W (N, H, C, Dk)."""

    @property
    def arrays(self) -> list[mx.array]:
        arrays = [getattr(self, field.name) for field in fields(self)]
        return [array for array in arrays if array is not None]

    def detached(self) -> "Terms":
        """The same, as constants of a gradient."""
        return replace(self, **{field.name: _detached(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The result of a scan."""

    outputs: mx.array
    """O (N, H, C, Dv)."""
    deltas: mx.array
    """U (N, H, C, Dv)."""
    states: mx.array
    """The state that each chunk begins with, (N, H, Dv, Dk)."""
    last: mx.array
    """The state after each row that begins with an initial state, (R, H, Dv, Dk), in the order of the rows."""


def recurrence(
    terms_of: Callable[..., Terms], inputs: Sequence[mx.array], initial_RHVK: mx.array, chunks: Chunks
) -> tuple[mx.array, mx.array]:
    """Outputs (M, H, Dv) and the states (R, H, Dv, Dk) after the rows that continue no other, both float32.

    `terms_of` takes the inputs (M, ..) as float32 chunks (N, C, ..). The backward keeps the inputs alone, and computes
    everything else again.
    """

    def chunked(flat: Sequence[mx.array]) -> list[mx.array]:
        return [chunks.gathered(array).astype(mx.float32) for array in flat]

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        *flat, initial = arguments
        scanned = scan(terms_of(*chunked(flat)), chunks, initial.astype(mx.float32))
        return chunks.scattered(scanned.outputs.swapaxes(1, 2)), scanned.last

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(arguments: list[mx.array], cotangents: list[mx.array], _: object) -> tuple[mx.array, ...]:
        *flat, initial = arguments
        outputs_NHCV = chunks.gathered(cotangents[0]).swapaxes(1, 2)
        of_initial: list[mx.array] = []

        def surrogate(arrays: list[mx.array]) -> mx.array:
            # its gradient is the chain rule through the terms
            terms = terms_of(*arrays)
            known = terms.detached()
            scanned = scan(known, chunks, initial.astype(mx.float32))
            of_terms, of_states = backward(known, scanned, chunks, outputs_NHCV, cotangents[1])
            of_initial.append(of_states)
            pairs = zip(terms.arrays, of_terms.arrays, strict=True)
            products = [(term * mx.stop_gradient(gradient)).sum() for term, gradient in pairs]
            return sum(products[1:], products[0])

        of_chunks = mx.grad(surrogate)(chunked(flat))
        of_flat = [chunks.scattered(part).astype(array.dtype) for part, array in zip(of_chunks, flat, strict=True)]
        return (*of_flat, of_initial[0].astype(initial.dtype))

    outputs_MHV, last_RHVK = forward(*inputs, initial_RHVK)
    return outputs_MHV, last_RHVK


def scan(terms: Terms, chunks: Chunks, initial_RHVK: mx.array) -> Scanned:
    """Pass states through all chunks, from the initial states of the rows that continue none."""
    own = terms.updates if terms.removals is not None else _transposed(terms.values) @ terms.updates
    states: list[mx.array] = []
    deltas: list[mx.array] = []
    starting, continuing = chunks.starting, chunks.continuing
    last = _pass(terms, own, starting, rearranged(initial_RHVK, starting.ranks), states, deltas)
    if continuing.counts:
        _pass(terms, own, continuing, rearranged(last, chunks.parents), states, deltas)
    states_NHVK = mx.concatenate(states)
    deltas_NHCV = terms.values if terms.removals is None else mx.concatenate(deltas)
    outputs = terms.readouts @ _transposed(states_NHVK) + terms.inner @ deltas_NHCV
    ordered = rearranged(last, _inverse(starting.ranks))
    return Scanned(outputs=outputs, deltas=deltas_NHCV, states=states_NHVK, last=ordered)


def _inverse(order: Indices) -> Indices:
    return np.argsort(order).astype(np.int32)


def _pass(
    terms: Terms, own: mx.array, stage: Stage, state: mx.array, states: list[mx.array], deltas: list[mx.array]
) -> mx.array:
    """Pass the states of a stage's rows through its chunks; append what each chunk begins with, and U.

    Returns the states after all rows, in the order of the stage."""
    if terms.removals is not None and scan_kernel.fits(terms.values, terms.removals):
        before, changes, last = chunk_scan(
            *(terms.values, terms.removals, terms.updates, terms.decay, state), stage.counts, stage.first
        )
        states.append(before)
        deltas.append(changes)
        return last
    ended: list[mx.array] = []
    chunk = stage.first
    for count in stage.counts:
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        part = slice(chunk, chunk + count)
        states.append(state)
        added = own[part]
        if terms.removals is not None:
            delta = terms.values[part] - terms.removals[part] @ _transposed(state)
            deltas.append(delta)
            added = _transposed(delta) @ added
        state = state * terms.decay[part] + added
        chunk += count
    return mx.concatenate([state, *reversed(ended)]) if ended else state


def backward(
    terms: Terms, scanned: Scanned, chunks: Chunks, outputs_NHCV: mx.array, last_RHVK: mx.array | None
) -> tuple[Terms, mx.array]:
    """Gradients with respect to `terms` and the initial states, given those of the outputs and of the last states."""
    within = _transposed(terms.inner) @ outputs_NHCV
    read = _transposed(outputs_NHCV) @ terms.readouts
    starting, continuing = chunks.starting, chunks.continuing
    after: dict[int, mx.array] = {}
    deltas: dict[int, mx.array] = {}
    shape = scanned.states.shape[1:]
    ranks = starting.ranks
    state = mx.zeros((len(ranks), *shape)) if last_RHVK is None else rearranged(last_RHVK, ranks)
    if continuing.counts:
        zeros = mx.zeros((len(continuing.rows), *shape))
        branches = _pass_back(terms, within, read, continuing, zeros, after, deltas)
        state = state + sum_branches(branches, chunks.parents, len(ranks))
    state = _pass_back(terms, within, read, starting, state, after, deltas)
    after_NHVK = mx.concatenate([after[chunk] for chunk in sorted(after)])
    if terms.removals is None:
        deltas_NHCV = within + terms.updates @ _transposed(after_NHVK)
    else:
        deltas_NHCV = mx.concatenate([deltas[chunk] for chunk in sorted(deltas)])
    kept = after_NHVK * scanned.states
    axes = (-2, -1) if terms.decay.shape[-1] == 1 else (-2,)
    gradients = Terms(
        values=deltas_NHCV,
        removals=None if terms.removals is None else -(deltas_NHCV @ scanned.states),
        readouts=outputs_NHCV @ scanned.states,
        updates=scanned.deltas @ after_NHVK,
        inner=outputs_NHCV @ _transposed(scanned.deltas),
        decay=kept.sum(axis=axes, keepdims=True),
    )
    return gradients, rearranged(state, _inverse(ranks))


def _pass_back(
    terms: Terms,
    within: mx.array,
    read: mx.array,
    stage: Stage,
    state: mx.array,
    after: dict[int, mx.array],
    deltas: dict[int, mx.array],
) -> mx.array:
    """Pass gradients of states back through a stage's chunks, from those after all its rows.

    Keeps, by the first chunk of a step, the gradients of the states after it, and of U. Returns those of the first
    states."""
    if terms.removals is not None and scan_kernel.fits(within, terms.updates):
        after[stage.first], deltas[stage.first], first = chunk_scan(
            *(within, terms.updates, terms.removals, terms.decay, state), stage.counts, stage.first, more_NHVK=read
        )
        return first
    chunk = stage.first + sum(stage.counts)
    ended = state
    state = ended[:0]
    for count in reversed(stage.counts):
        if count > len(state):
            state = mx.concatenate([state, ended[len(state) : count]]) if len(state) else ended[:count]
        chunk -= count
        part = slice(chunk, chunk + count)
        after[chunk] = state
        before = state * terms.decay[part] + read[part]
        if terms.removals is not None:
            delta = within[part] + terms.updates[part] @ _transposed(state)
            deltas[chunk] = delta
            before = before - _transposed(delta) @ terms.removals[part]
        state = before
    return state


def sum_branches(branches: mx.array, parents: Indices, num_parents: int) -> mx.array:
    """The sum of the branches of each parent."""
    flat = branches.reshape(len(parents), -1)
    _, (sums,) = mx.vjp(lambda source: taken(source, parents), [mx.zeros((num_parents, flat.shape[1]))], [flat])
    return sums.reshape(num_parents, *branches.shape[1:])


class Decay:
    """Products of gates within chunks, given log a (.., C, 1), or (.., C, D) for a gate per channel."""

    def __init__(self, log_a: mx.array) -> None:
        self.log_a = log_a
        self._computed = chunk_gates(log_a) if gates_kernel.fits(log_a) else None

    def from_start(self) -> mx.array:
        """exp(G_t), of the shape of log a: the gates up to token t."""
        return self._computed[0] if self._computed else mx.exp(mx.cumsum(self.log_a, axis=-2))

    def to_end(self) -> mx.array:
        """exp(G_C - G_t): the gates after token t."""
        if self._computed:
            return self._computed[1]
        return mx.exp(mx.cumsum(self.log_a, axis=-2, reverse=True, inclusive=False))

    def between(self) -> mx.array:
        """exp(G_t - G_i): the gates after token i up to t, zero where i is later; (.., C, C), or (.., C, C, D)."""
        if self._computed:
            return self._computed[2]
        is_after, is_seen = _order(self.log_a.shape[-2])
        # differences of sums would lose the digits of slow gates after fast ones
        if self.log_a.shape[-1] == 1 and mx.default_device() == mx.Device(mx.cpu):
            # products of few tokens are much faster there, and GPUs may round what they multiply
            sums = mx.where(is_seen, _transposed(self.log_a), 0) @ is_after.astype(mx.float32)
            return clipped_exp(mx.where(is_seen, sums, -mx.inf))
        sums = mx.cumsum(mx.where(is_after[..., None], self.log_a[..., :, None, :], 0), axis=-3)
        gates = mx.exp(mx.where(is_seen[..., None], sums, -mx.inf))
        return gates[..., 0] if gates.shape[-1] == 1 else gates


@cache
def _order(size: int) -> tuple[mx.array, mx.array]:
    """Whether token t is after i, and whether it is not before, (C, C)."""
    places = np.arange(size)
    return mx.array(places[:, None] > places), mx.array(places[:, None] >= places)


def _transposed(array: mx.array) -> mx.array:
    return array.swapaxes(-1, -2)


def _detached(array: mx.array | None) -> mx.array | None:
    return None if array is None else mx.stop_gradient(array)
