"""exp and SwiGLU of our own for CPUs."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations as mlx_lm_activations

from parallm.model.exponential import exp, swiglu


def test_exp_is_exact_to_a_unit_in_the_last_place() -> None:
    x = mx.random.uniform(-87.2, 88.0, (100_000,), key=mx.random.key(1))
    exact = np.exp(np.array(x).astype(np.float64))
    assert np.abs(np.array(exp(x)) / exact - 1).max() < 1.2e-7


def test_exp_of_what_is_too_small_is_zero_and_nothing_hides_what_is_no_number() -> None:
    found = exp(mx.array([-mx.inf, -1e9, -88.0, 0.0, mx.nan])).tolist()
    assert found[:4] == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(found[4])


def test_other_types_and_other_functions_are_left_to_mlx() -> None:
    x = mx.array([0.5, -2.0], mx.bfloat16)
    assert exp(x).tolist() == mx.exp(x).tolist()
    assert swiglu(x, x).tolist() == mlx_lm_activations.swiglu(x, x).tolist()


@pytest.mark.parametrize("place", [0, 3, 70])
def test_an_element_has_the_same_bits_in_any_company(place: int) -> None:
    x = mx.random.normal((71,), key=mx.random.key(2))
    y = mx.random.normal((71,), key=mx.random.key(3))
    assert exp(x)[place].item() == exp(x[place : place + 1]).item()
    assert swiglu(x, y)[place].item() == swiglu(x[place : place + 1], y[place : place + 1]).item()


def test_swiglu_is_that_of_mlx_lm_for_gates_of_any_size() -> None:
    gate = mx.concatenate([mx.linspace(-20, 20, 81), mx.array([-300.0, -90.0, 90.0, 300.0])])
    x = mx.random.normal(gate.shape, key=mx.random.key(4))
    assert mx.allclose(swiglu(gate, x), mlx_lm_activations.swiglu(gate, x), rtol=2e-6, atol=1e-6).item()


def test_gradients_are_those_of_mlx_lm() -> None:
    gate, x, weights = (4 * mx.random.normal((3, 50), key=mx.random.key(seed)) for seed in (5, 6, 7))
    ours = mx.grad(lambda *both: (swiglu(*both) * weights).sum(), (0, 1))(gate, x)
    theirs = mx.grad(lambda *both: (mlx_lm_activations.swiglu(*both) * weights).sum(), (0, 1))(gate, x)
    for one, other in zip(ours, theirs, strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-5).item()
    assert mx.array_equal(mx.grad(lambda x: exp(x).sum())(x), exp(x)).item()
