from typing import Any

import mlx.core as mx
import pytest

from parallm.model.patches.provenance import FusedAdd


def summand() -> FusedAdd:
    return FusedAdd(mx.array([1.0, 2.0]), lambda other: other * 100)


def test_a_sum_is_left_to_whoever_made_the_summand() -> None:
    other = mx.array([3.0, 4.0])
    assert (other + summand()).tolist() == (summand() + other).tolist() == [300.0, 400.0]


@pytest.mark.parametrize("other", [1, 1.0, mx.array(1.0), mx.ones((1, 2)), mx.ones(2, mx.float16)])
def test_anything_but_its_like_is_added_as_to_any_array(other: mx.array | float) -> None:
    wanted: Any = mx.array([1.0, 2.0]) + other
    for found in [other + summand(), summand() + other]:
        assert found.tolist() == wanted.tolist()
        assert found.dtype == wanted.dtype


def test_it_is_an_array_to_all_else() -> None:
    assert mx.multiply(summand(), 2).tolist() == [2.0, 4.0]
    assert mx.stack([summand(), summand()]).tolist() == [[1.0, 2.0]] * 2
    compiled = mx.compile(lambda x: x + FusedAdd(x * 2, lambda other: other * 100))
    assert compiled(mx.array([1.0, 2.0])).tolist() == [100.0, 200.0]
