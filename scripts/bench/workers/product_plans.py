"""Microseconds of products of few rows with weights of 4 bits, by plan: that of `quantized_gemm`, and others.

Weights are random, of more than one layer, so that they come from memory. Kernels are timed by torch's profiler, since
one takes less than its launch.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels import quantized_gemm as module
from parallm.model.kernels.cuda import listed_kernels, target
from parallm.model.kernels.preparation import prepare_kernels
from parallm.model.kernels.quantized_gemm import CHUNKS, MAX_STAGES, MAX_WIDE, MIN_STAGES, QuantizedGemmPlan, cost

GROUP_SIZE = 64
BYTES = 150_000_000
"""Of the weights that one plan reads, thrice what an H200 keeps in its cache."""
DEEP = (1, 2, 4, 8)
TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product with a linear layer of a model."""

    name: str
    rows: int
    inputs: int
    outputs: int
    is_gated: bool
    is_whole: bool


def main(*, products: list[dict[str, Any]], num_plans: int) -> Iterator[dict[str, Any]]:
    """Yield the product, its plans, the chosen one first, and the microseconds of each; `num_plans` are those that
    `quantized_gemm` takes for the fastest."""
    cases = [(product, plans_of(product)[:num_plans]) for product in (Product(**one) for one in products)]
    with listed_kernels() as kernels:
        for product, plans in cases:
            layer, x_B1I = linear(product), mx.zeros((product.rows, 1, product.inputs), mx.bfloat16)
            for plan in plans:
                multiply(product, plan, x_B1I, layer)
    prepare_kernels(kernels, target(), lambda done, count: print(f"{done} of {count} kernels", file=sys.stderr))
    for product, plans in cases:
        yield {**asdict(product), "plans": [asdict(plan) for plan in plans], "microseconds": times(product, plans)}


def plans_of(product: Product) -> list[QuantizedGemmPlan]:
    """The chosen plan, and the other possible ones with as many parts by their cost."""
    chosen = module.plan(product.rows, product.inputs, product.outputs, GROUP_SIZE, is_whole=product.is_whole)
    shapes = itertools.product(CHUNKS, (2, 1), range(1, MAX_WIDE + 1), DEEP)
    found: list[QuantizedGemmPlan] = []
    for chunk, tall, wide, deep in shapes:
        if deep * module.UNIT > chunk:
            continue
        stages = (
            QuantizedGemmPlan(
                tiles=chosen.tiles,
                wide=wide,
                tall=tall,
                deep=deep,
                chunk=chunk,
                stages=count,
                splits=chosen.splits,
                group_size=GROUP_SIZE,
                scale_bytes=chosen.scale_bytes,
            )
            for count in range(MAX_STAGES, MIN_STAGES - 1, -1)
        )
        plan = next((one for one in stages if module.is_possible(one, product.inputs)), None)
        found += [plan] if plan is not None else []
    others = sorted(set(found) - {chosen}, key=lambda plan: cost(plan, product.inputs, product.outputs))
    return [chosen, *others]


def linear(product: Product) -> nn.QuantizedLinear:
    layer = nn.QuantizedLinear(product.inputs, product.outputs, bias=False, group_size=GROUP_SIZE, bits=module.BITS)
    layer.set_dtype(mx.bfloat16)
    return layer


def multiply(product: Product, plan: QuantizedGemmPlan, x_B1I: mx.array, layer: nn.Module) -> mx.array:
    with patch.object(module, "plan", lambda *_, **__: plan):
        return module.quantized_gemm(x_B1I, layer, is_whole=product.is_whole, is_gated=product.is_gated)


def times(product: Product, plans: Sequence[QuantizedGemmPlan]) -> list[float]:
    """The median of each plan; infinite for one that cannot be launched."""
    from torch.autograd import DeviceType  # noqa: PLC0415  # after MLX has its context
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    layers = [linear(product) for _ in range(2 + BYTES // (product.inputs * product.outputs // 2))]
    x_B1I = mx.random.normal((product.rows, 1, product.inputs)).astype(mx.bfloat16)
    mx.eval(x_B1I, [layer.parameters() for layer in layers])
    found: list[list[float]] = [[] for _ in plans]
    able = [number for number, plan in enumerate(plans) if can_launch(product, plan, x_B1I, layers[0])]
    launched = [number for number in able for _ in layers]
    for _ in range(TURNS):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for number in able:
                for layer in layers:
                    mx.eval(multiply(product, plans[number], x_B1I, layer))  # by itself: others could run beside it
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type == DeviceType.CUDA and "quantized_gemm" in event.name
        )
        for number, (start, end) in zip(launched, spans, strict=True):
            found[number].append(end - start)
    return [median(one) if one else float("inf") for one in found]


def can_launch(product: Product, plan: QuantizedGemmPlan, x_B1I: mx.array, layer: nn.Module) -> bool:
    try:
        mx.eval(multiply(product, plan, x_B1I, layer))
    except RuntimeError as error:
        print(f"{plan}: {error}", file=sys.stderr)
        return False
    return True
