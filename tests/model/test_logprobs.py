"""exp, softmax and SwiGLU as processors compute them on which MLX's own exp is slow; elsewhere they are MLX's own."""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.model.logprobs import clipped_exp, is_slow, softmax
from parallm.model.patches.forward import precise_swiglu, silu, swiglu

LEAST_NORMAL = 1.2e-38


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    numbers = np.linspace(-87.3, 87.9, 100_003, dtype=np.float32)
    found = np.array(clipped_exp(mx.array(numbers))).astype(np.float64)
    exact = np.exp(numbers.astype(np.float64))
    assert np.abs(found / exact - 1).max() < (1.3e-7 if is_slow(mx.array(numbers)) else 2e-6)


def test_exp_of_hidden_positions_is_exactly_zero_and_of_nothing_exactly_one() -> None:
    assert clipped_exp(mx.array([-math.inf, -1e30, -100.0, -88.1, 0.0, -0.0])).tolist() == [0, 0, 0, 0, 1, 1]


def test_exp_of_a_nan_is_a_nan() -> None:
    assert math.isnan(clipped_exp(mx.array([math.nan])).item())


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1001])
def test_a_number_gives_the_same_bits_in_any_array_and_inside_gradients(length: int) -> None:
    numbers = mx.random.normal((1001,), key=mx.random.key(3)) * 20
    alone = mx.concatenate([clipped_exp(numbers[place : place + 1]) for place in range(length)])
    assert mx.array_equal(clipped_exp(numbers)[:length], alone)
    traced = mx.vjp(clipped_exp, [numbers[:length]], [mx.ones((length,))])[0][0]
    assert mx.array_equal(traced, alone)
    assert mx.array_equal(clipped_exp(numbers.reshape(7, 143).T)[3, :7], clipped_exp(numbers)[3::143])


def test_softmax_and_its_gradient_are_those_of_mlx() -> None:
    scores = mx.random.normal((5, 3, 70), key=mx.random.key(1)) * 10
    hidden = mx.where(mx.arange(70) < 60, scores, -mx.inf)
    given = mx.random.normal(scores.shape, key=mx.random.key(2))
    found, gradients = mx.vjp(softmax, [hidden], [given])
    expected, expected_gradients = mx.vjp(lambda x: mx.softmax(x, axis=-1), [hidden], [given])
    assert mx.allclose(found[0], expected[0], rtol=1e-5, atol=1e-30)
    assert mx.allclose(gradients[0], expected_gradients[0], rtol=1e-5, atol=1e-6)
    assert mx.array_equal(found[0], softmax(hidden))
    assert not found[0][..., 60:].any()


def silu_times(gate: mx.array, x: mx.array) -> mx.array:
    return silu(gate) * x


def norm_gate(gate: mx.array, x: mx.array) -> mx.array:
    return precise_swiglu(x, gate, x)


@pytest.mark.parametrize("swiglu", [swiglu, silu_times, norm_gate])
def test_swiglu_and_its_gradients_are_those_of_mlx_from_the_smallest_to_the_largest_gate(
    swiglu: Callable[[mx.array, mx.array], mx.array],
) -> None:
    gate = mx.concatenate([mx.linspace(-12, 12, 500), mx.array([-1e4, -90.0, 90.0, 1e4])])
    x, given = (mx.random.normal(gate.shape, key=mx.random.key(key)) for key in (4, 5))
    found, gradients = mx.vjp(swiglu, [gate, x], [given])
    expected, expected_gradients = mx.vjp(lambda gate, x: nn.silu(gate) * x, [gate, x], [given])
    for ours, theirs in zip([*found, *gradients], [*expected, *expected_gradients], strict=True):
        assert mx.allclose(ours, theirs, rtol=3e-6, atol=3e-6)
    assert mx.array_equal(found[0], swiglu(gate, x))


def test_a_gate_of_16_bits_is_multiplied_in_float32() -> None:
    h, gate = (mx.random.normal((4, 64), mx.bfloat16, key=mx.random.key(key)) for key in (6, 7))
    x = h.astype(mx.float32)
    found = precise_swiglu(h, gate, x)
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, (nn.silu(gate.astype(mx.float32)) * x).astype(mx.bfloat16))
