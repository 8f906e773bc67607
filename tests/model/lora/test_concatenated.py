"""A few adapters in one product: every row keeps its own part of it."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.model.adapters.adapter import Adapter
from parallm.model.lora.concatenated import concatenate_loras
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import SingleLora
from parallm.model.lora.single import single_lora as view_of
from parallm.model.shared_model import SharedModel
from tests.conftest import BLAS, IS_INTEL

Variant = Callable[..., Adapter]

TOKENS = mx.array([[5, 300, 17, 9, 44, 2], [7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]])


@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize("length", [1, 6])
def test_rows_of_a_few_adapters_get_the_bits_that_they_get_alone(
    length: int, variant: Variant, load_tiny: Callable[..., SharedModel]
) -> None:
    model = load_tiny("qwen2")
    forms = [
        variant(model, 1, rank=2),
        variant(model, 2, rank=3, dora=True),
        variant(model, 3, rank=20, rslora=True, ranks={"q_proj": 1, "down_proj": 40}),
    ]
    views = [view_of(each.arrays, lora_scaling(each, model)) for each in forms]
    places = [2, -1, 0, 1]
    together = model.hidden(
        TOKENS[:, :length], model.make_cache(), concatenate_loras(views, model.targets).select(places)
    )
    for row, place in enumerate(places):
        rows = mx.repeat(TOKENS[row : row + 1, :length], 4, axis=0)  # products of fewer rows are another matter
        alone = model.hidden(rows, model.make_cache(), None if place < 0 else views[place])
        assert mx.array_equal(together[row], alone[0]).item()


@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize(("rank", "count"), [(16, 33), (100, 9), (300, 3)])
def test_rows_of_many_columns_get_the_bits_that_they_get_alone(rank: int, count: int) -> None:
    if count < 4 and not IS_INTEL:
        pytest.skip("fewer than 4 rows of a product have bits of their own on this CPU")
    keys = mx.random.split(mx.random.key(0), 2 * count + 1)
    matrices = [
        (mx.random.normal((64, rank), key=a), mx.random.normal((rank, 96), key=b))
        for a, b in keys[1:].reshape(count, 2, 2)
    ]
    adapters = [SingleLora({"target": a}, {"target": b}, {}) for a, b in matrices]
    x, y = mx.random.normal((count, 1, 64), key=keys[0]), mx.zeros((count, 1, 96))
    together = concatenate_loras(adapters, ["target"]).select([*range(count)]).apply("target", x, y)
    for row, adapter in enumerate(adapters):
        alone = adapter.apply("target", mx.repeat(x[row : row + 1], 4, axis=0), mx.zeros((4, 1, 96)))
        assert mx.array_equal(together[row], alone[0]).item()


def test_a_target_that_only_some_adapters_have_changes_only_their_rows() -> None:
    a, b = mx.ones((3, 16)), mx.ones((16, 2))
    whole = SingleLora({"first": a, "second": 2 * a}, {"first": b, "second": b}, {})
    part = SingleLora({"second": 3 * a}, {"second": b}, {})
    rows = concatenate_loras([whole, part], ["first", "second", "third"]).select([0, 1, -1])
    x = mx.array([[[1.0, 0, 0]], [[0, 2.0, 0]], [[0, 0, 3.0]]])
    y = mx.ones((3, 1, 2))
    assert rows.apply("first", x, y).tolist() == [[[17.0, 17.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    assert rows.apply("second", x, y).tolist() == [[[33.0, 33.0]], [[97.0, 97.0]], [[1.0, 1.0]]]
    assert rows.apply("third", x, y) is y


def test_what_another_adapter_makes_of_a_row_does_not_reach_it() -> None:
    small, huge = mx.ones((3, 16)), mx.full((3, 16), 3e38)
    views = [SingleLora({"target": a}, {"target": mx.ones((16, 2))}, {}) for a in (small, huge)]
    rows = concatenate_loras(views, ["target"]).select([0, 1])
    found = rows.apply("target", mx.full((2, 1, 3), 9.0), mx.zeros((2, 1, 2)))
    assert found[0].tolist() == [[432.0, 432.0]]
    assert not mx.isfinite(found[1]).any().item()
