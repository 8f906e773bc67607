import gc
from typing import Any

import mlx.core as mx
import pytest

from parallm.model.patches import forward
from parallm.model.patches.forward import FusedAdd, origin_of, set_origin


def test_an_array_is_known_by_itself_and_not_by_what_it_holds() -> None:
    array, alike = mx.zeros(3), mx.zeros(3)
    set_origin(array, "first")
    assert origin_of(array) == "first"
    assert origin_of(alike) is None


def test_nothing_is_kept_longer_than_the_array() -> None:
    before = len(forward._origins)
    array = mx.zeros(3)
    set_origin(array, "gone")
    assert len(forward._origins) == before + 1
    del array
    gc.collect()
    assert len(forward._origins) == before


def fused() -> FusedAdd:
    return FusedAdd(mx.array([1.0, 2.0]), lambda other: other * 100)


def test_a_sum_is_left_to_the_fused_operand() -> None:
    other = mx.array([3.0, 4.0])
    assert (other + fused()).tolist() == (fused() + other).tolist() == [300.0, 400.0]


@pytest.mark.parametrize("other", [1, 1.0, mx.array(1.0), mx.ones((1, 2)), mx.ones(2, mx.float16)])
def test_an_operand_of_another_form_is_added_as_to_any_array(other: mx.array | float) -> None:
    expected: Any = mx.array([1.0, 2.0]) + other
    for total in [other + fused(), fused() + other]:
        assert total.tolist() == expected.tolist()
        assert total.dtype == expected.dtype


def test_it_is_an_array_to_all_else() -> None:
    assert mx.multiply(fused(), 2).tolist() == [2.0, 4.0]
    assert mx.stack([fused(), fused()]).tolist() == [[1.0, 2.0]] * 2
    compiled = mx.compile(lambda x: x + FusedAdd(x * 2, lambda other: other * 100))
    assert compiled(mx.array([1.0, 2.0])).tolist() == [100.0, 200.0]
