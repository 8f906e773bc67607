"""Plans of products that are compared with the one in use."""

from bench.measure.products import LAYERS, best_over_chosen
from bench.workers.product_plans import Product, plans_of

from parallm.model.kernels import quantized_gemm


def test_other_plans_stand_behind_the_one_in_use_and_are_possible() -> None:
    product = Product(name="o", rows=32, inputs=4096, outputs=4096, is_gated=False, is_whole=False)
    chosen, *others = plans_of(product)
    assert chosen == quantized_gemm.plan(32, 4096, 4096, 64, is_whole=False)
    assert len(others) > 50
    assert {plan.splits for plan in others} == {chosen.splits}
    assert len({chosen, *others}) == len(others) + 1
    assert all(quantized_gemm.is_possible(plan, product.inputs) for plan in others)


def test_the_products_of_a_layer_count_together() -> None:
    first, second = LAYERS
    found = [
        {"name": f"{first} qkv", "rows": 1, "microseconds": [10.0, 5.0]},
        {"name": f"{first} o", "rows": 1, "microseconds": [10.0, 20.0]},
        {"name": f"{second} qkv", "rows": 1, "microseconds": [10.0, 11.0]},
        {"name": f"{first} qkv", "rows": 32, "microseconds": [10.0, 1.0]},
    ]
    assert best_over_chosen(found, 1) == 0.75
