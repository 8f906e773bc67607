"""Chunks against recurrences that take one token after the other, forward and backward."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.model.recurrence.gated_delta import CPU_CHUNK, gated_delta, inverse_unit_lower, merged_inverse
from parallm.model.recurrence.rows import PackedRows, Row
from parallm.model.recurrence.short_conv import packed_short_conv, short_conv
from parallm.model.recurrence.ssd import ssd

Outputs = tuple[mx.array, mx.array]
LAYOUTS: dict[str, list[tuple[int, int | None]]] = {
    "one token": [(1, None)],
    "a chunk less one": [(CPU_CHUNK - 1, None)],
    "a chunk": [(CPU_CHUNK, None)],
    "a chunk and one": [(CPU_CHUNK + 1, None)],
    "some chunks": [(3 * CPU_CHUNK + 5, None)],
    "shared prompts": [(40, None), (33, 0), (7, 0), (64, None), (1, 3), (70, 3), (5, None)],
}


def packed(layout: Sequence[tuple[int, int | None]], padding: int = 0) -> PackedRows:
    rows: list[Row] = []
    for length, after in layout:
        rows.append(Row(sum(row.length for row in rows), length, after))
    return PackedRows(rows, sum(row.length for row in rows) + padding)


def by_rows(rows: PackedRows, initial: mx.array, step: Callable[[mx.array, int], tuple[mx.array, mx.array]]) -> Outputs:
    """Outputs and last states of `step` (state, token) -> (state, output), one token after the other."""
    outputs: list[mx.array] = []
    states: list[mx.array] = []
    for index, row in enumerate(rows.rows):
        state = initial[rows.starting.index(index)] if row.after is None else states[row.after]
        for token in range(row.start, row.start + row.length):
            state, output = step(state, token)
            outputs.append(output)
        states.append(state)
    return mx.stack(outputs), mx.stack([states[index] for index in rows.starting])


def gated_delta_by_steps(
    q: mx.array, k: mx.array, v: mx.array, log_a: mx.array, b: mx.array, initial: mx.array, rows: PackedRows
) -> Outputs:
    q, k = (mx.repeat(array, v.shape[1] // k.shape[1], axis=1) for array in (q, k))

    def step(state: mx.array, t: int) -> tuple[mx.array, mx.array]:
        gate = mx.exp(log_a[t])
        state = state * (gate[:, None, None] if gate.ndim == 1 else gate[:, None, :])
        change = b[t][:, None] * (v[t] - (state * k[t][:, None]).sum(axis=-1))
        state = state + change[..., None] * k[t][:, None]
        return state, (state * q[t][:, None]).sum(axis=-1)

    return by_rows(rows, initial, step)


def ssd_by_steps(
    x: mx.array, log_a: mx.array, b: mx.array, c: mx.array, initial: mx.array, rows: PackedRows
) -> Outputs:
    b, c = (mx.repeat(array, x.shape[1] // b.shape[1], axis=1) for array in (b, c))

    def step(state: mx.array, t: int) -> tuple[mx.array, mx.array]:
        state = mx.exp(log_a[t])[:, None, None] * state + x[t][..., None] * b[t][:, None]
        return state, (state * c[t][:, None]).sum(axis=-1)

    return by_rows(rows, initial, step)


def delta_inputs(
    rows: PackedRows, *, gates: float = 1.0, per_channel: bool = False, alike: bool = False
) -> list[mx.array]:
    """Random inputs; `gates` scales log a, and with `alike` all keys are equal."""
    size, key_heads, heads, key, value = rows.num_tokens, 2, 4, 8, 6
    q, k = (mx.random.normal((size, key_heads, key)) for _ in range(2))
    k = mx.broadcast_to(k[:1], k.shape) if alike else k
    q, k = (array / mx.linalg.norm(array, axis=-1, keepdims=True) for array in (q, k))
    log_a = -gates * mx.exp(2 * mx.random.normal((size, heads, key) if per_channel else (size, heads)) - 2)
    b = mx.random.uniform(1.8 if alike else 0.0, 2.0, (size, heads))
    initial = mx.random.normal((len(rows.starting), heads, value, key))
    return [q, k, mx.random.normal((size, heads, value)), log_a, b, initial]


def ssd_inputs(rows: PackedRows) -> list[mx.array]:
    size, heads, groups, head, state = rows.num_tokens, 4, 2, 6, 8
    b, c = (mx.random.normal((size, groups, state)) for _ in range(2))
    log_a = -mx.exp(2 * mx.random.normal((size, heads)) - 2)
    initial = mx.random.normal((len(rows.starting), heads, head, state))
    return [mx.random.normal((size, heads, head)), log_a, b, c, initial]


def worst_error(
    found: Callable[..., Outputs], expected: Callable[..., Outputs], inputs: Sequence[mx.array], rows: PackedRows
) -> float:
    """The largest relative error of outputs, last states and all gradients."""
    cotangents: list[mx.array] = []

    def compute(function: Callable[..., Outputs]) -> list[mx.array]:
        outputs = function(*inputs, rows)
        cotangents[:] = cotangents or [mx.random.normal(output.shape) for output in outputs]

        def loss(*arrays: mx.array) -> mx.array:
            parts = zip(function(*arrays, rows), cotangents, strict=True)
            return mx.stack([(output * cotangent).sum() for output, cotangent in parts]).sum()

        return [*outputs, *mx.grad(loss, argnums=list(range(len(inputs))))(*inputs)]

    pairs = zip(compute(found), compute(expected), strict=True)
    return max(relative(one, other) for one, other in pairs)


def relative(found: mx.array, expected: mx.array) -> float:
    norm = float(mx.linalg.norm(expected).item())
    return float(mx.linalg.norm(found - expected).item()) / max(norm, 1e-6)


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(5)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("per_channel", [False, True], ids=["gate per head", "gate per channel"])
def test_gated_delta_is_that_of_one_step_after_the_other(name: str, per_channel: bool) -> None:
    rows = packed(LAYOUTS[name])
    inputs = delta_inputs(rows, per_channel=per_channel)
    assert worst_error(gated_delta, gated_delta_by_steps, inputs, rows) <= 1e-5


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_state_space_dual_is_that_of_one_step_after_the_other(name: str) -> None:
    rows = packed(LAYOUTS[name])
    assert worst_error(ssd, ssd_by_steps, ssd_inputs(rows), rows) <= 1e-5


@pytest.mark.parametrize("gates", [0.0, 1.0, 1e4], ids=["nothing is forgotten", "some", "all"])
@pytest.mark.parametrize("alike", [False, True], ids=["", "one token repeated"])
def test_gated_delta_holds_for_extreme_gates_and_keys(gates: float, alike: bool) -> None:
    rows = packed(LAYOUTS["some chunks"])
    inputs = delta_inputs(rows, gates=gates, alike=alike)
    assert worst_error(gated_delta, gated_delta_by_steps, inputs, rows) <= 5e-5


def test_a_chunk_that_sees_another_row_would_be_found() -> None:
    rows = packed(LAYOUTS["shared prompts"])
    merged = packed([(rows.num_tokens, None)])
    q, k, v, log_a, b, _ = delta_inputs(rows)
    found = gated_delta(q, k, v, log_a, b, None, merged)[0]
    assert relative(found, gated_delta(q, k, v, log_a, b, None, rows)[0]) > 0.1


@pytest.mark.parametrize("inverse", [inverse_unit_lower, merged_inverse])
def test_the_inverse_of_a_chunk_of_one_token_repeated_is_exact(inverse: Callable[[mx.array], mx.array]) -> None:
    lower = np.tril(np.full((64, 64), 0.98), -1)
    found = np.array(inverse(mx.array(lower.astype(np.float32))))
    assert np.abs(found - np.linalg.inv(np.eye(64) + lower)).max() <= 1e-5


def test_padding_gives_zeros_and_takes_no_gradient() -> None:
    rows = packed([(5, None), (3, 0)], padding=4)
    q, k, v, log_a, b, initial = delta_inputs(rows)
    assert not mx.any(gated_delta(q, k, v, log_a, b, initial, rows)[0][8:]).item()
    gradient = mx.grad(lambda v: gated_delta(q, k, v, log_a, b, initial, rows)[0].sum())(v)
    assert not mx.any(gradient[8:]).item()
    assert mx.any(gradient[:8]).item()


@pytest.mark.parametrize("bias", [False, True])
def test_a_short_convolution_is_that_of_mlx(bias: bool) -> None:
    conv = nn.Conv1d(6, 6, 4, groups=6, bias=bias)
    x = mx.random.normal((2, 13, 6))
    found = short_conv(x, conv.weight, conv.get("bias"))
    assert mx.allclose(found, conv(x), atol=1e-5).item()
    assert mx.array_equal(short_conv(x[:, 3:7], conv.weight, conv.get("bias")), found[:, 3:4]).item()


def test_packed_rows_of_a_convolution_see_their_prompts_and_nothing_else() -> None:
    rows = packed([(2, None), (5, 0), (1, 0), (6, None), (3, 3)], padding=3)
    weight, flat = mx.random.normal((6, 4, 1)), mx.random.normal((rows.num_tokens, 6))

    def alone(flat: mx.array, row: Row) -> mx.array:
        parts = [mx.zeros((3, 6))]
        if row.after is not None:
            parent = rows.rows[row.after]
            parts.append(flat[parent.start : parent.start + parent.length])
        parts.append(flat[row.start : row.start + row.length])
        return short_conv(mx.concatenate(parts)[None], weight, None)[0, -row.length :]

    def whole(flat: mx.array) -> mx.array:
        return mx.concatenate([*(alone(flat, row) for row in rows.rows), mx.zeros((3, 6))])

    cotangent = mx.random.normal(flat.shape)
    found = mx.vjp(lambda flat: packed_short_conv(flat, weight, None, rows), [flat], [cotangent])
    expected = mx.vjp(whole, [flat], [cotangent])
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(one[0], other[0], atol=1e-5).item()
