"""Products with packed weights against unpacked ones: the kernel's source on a CPU, the kernel on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.kernels import quantized_gemm as module
from parallm.model.kernels.cuda import architecture, on_cuda
from parallm.model.kernels.quantized_gemm import (
    MAX_ROWS,
    MAX_SHARED_BYTES,
    MIN_STAGES,
    PROCESSORS,
    UNIT,
    QuantizedGemmPlan,
    fits,
    plan,
    quantized_gemm,
)
from parallm.model.kernels.swiglu import swiglu_of_halves
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

needs_hopper = pytest.mark.skipif(not on_cuda() or architecture() != "sm_90", reason="needs a Hopper GPU")
SHAPES = [(4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256), (896, 1152), (4864, 896), (256, 8)]
"""Inputs and outputs."""
FORMS = [(shape, group_size) for shape in SHAPES for group_size in (32, 64, 128) if shape[0] % (2 * group_size) == 0]


@pytest.mark.parametrize(("shape", "group_size"), FORMS)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_plan_keeps_to_what_a_block_may_have(shape: tuple[int, int], group_size: int, is_whole: bool) -> None:
    for rows in (1, 8, 9, 32, 64, 65, MAX_ROWS):
        chosen = plan(rows, *shape, group_size, is_whole=is_whole)
        assert chosen.shared_bytes <= MAX_SHARED_BYTES
        assert chosen.threads <= 512
        assert chosen.tiles * 8 >= rows
        assert chosen.stages >= MIN_STAGES
        assert chosen.threads % (chosen.chunk // 8) == 0
        assert chosen.deep * UNIT <= chosen.chunk
        assert shape[0] // group_size * 2 % chosen.scale_bytes == 0
        assert chosen.splits == 1 or not is_whole


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)])
def test_blocks_of_large_weights_run_at_once(shape: tuple[int, int]) -> None:
    chosen = plan(32, *shape, 64, is_whole=shape[1] > 4096)
    blocks = -(-shape[1] // chosen.outputs) * chosen.splits
    assert 90 < blocks <= PROCESSORS
    assert chosen.wide * chosen.deep >= 8


def random_layer(
    inputs: int, outputs: int, group_size: int, dtype: mx.Dtype, *, bias: bool = False, bits: int = 4
) -> nn.QuantizedLinear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(outputs))
    layer.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(layer, group_size=group_size, bits=bits)


def expected(x: mx.array, layer: nn.QuantizedLinear) -> mx.array:
    """With weights rounded to their type once, in float32."""
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    weights = mx.dequantize(layer.weight, scales, biases, group_size=layer.group_size, bits=4)
    weights = weights.astype(layer.scales.dtype).astype(mx.float32)
    y: mx.array = x.astype(mx.float32) @ weights.T + layer.get("bias", 0)
    return y


def gated(y: mx.array, dtype: mx.Dtype) -> mx.array:
    gate, up = mx.split(y.astype(dtype).astype(mx.float32), 2, axis=-1)
    return nn.silu(gate) * up


def difference(found: mx.array, wanted: mx.array) -> float:
    """The largest, relative to the largest number; infinite where something is none."""
    assert found.shape == wanted.shape
    furthest = mx.abs(found.astype(mx.float32) - wanted).max().item() / mx.abs(wanted).max().item()
    return float(furthest) if furthest == furthest else float("inf")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    kernels = CpuKernels(tmp_path)
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", kernels)
    return kernels


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets products take a plan with other numbers."""

    def changed(**numbers: int) -> None:
        def other(*given: int, is_whole: bool) -> QuantizedGemmPlan:
            return replace(plan(*given, is_whole=is_whole), **numbers)

        monkeypatch.setattr(module, "plan", other)

    return changed


CASES = [
    (3, 512, 40, 64, False, {"wide": 1, "tall": 2, "deep": 2, "chunk": 256, "stages": 3, "splits": 2}),
    (9, 896, 72, 64, True, {"wide": 2, "tall": 1, "deep": 2, "chunk": 256, "stages": 4, "splits": 1}),
    (17, 1152, 24, 32, False, {"wide": 1, "tall": 1, "deep": 4, "chunk": 512, "stages": 3, "splits": 1}),
    (120, 640, 40, 32, False, {"wide": 1, "tall": 2, "deep": 1, "chunk": 128, "stages": 3, "splits": 4}),
    (1, 1536, 64, 128, True, {"wide": 2, "tall": 2, "deep": 1, "chunk": 128, "stages": 6, "splits": 4}),
]
"""Rows, inputs, outputs, group size, bias, and the plan's numbers."""


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(("dtype", "rounding"), [(mx.float16, 2e-3), (mx.bfloat16, 8e-3)])
@pytest.mark.parametrize(("rows", "inputs", "outputs", "group_size", "bias", "numbers"), CASES)
def test_threads_multiply_packed_weights(
    rows: int,
    inputs: int,
    outputs: int,
    group_size: int,
    bias: bool,
    numbers: dict[str, int],
    dtype: mx.Dtype,
    rounding: float,
    kernels: CpuKernels,
    follow: Callable[..., None],
) -> None:
    follow(**numbers)
    layer = random_layer(inputs, outputs, group_size, dtype, bias=bias)
    x = mx.random.normal((rows, 1, inputs), key=mx.random.key(rows)).astype(dtype)
    found = quantized_gemm(x, layer, is_whole=numbers["splits"] == 1)
    assert found.shape == (numbers["splits"], rows, 1, outputs)
    of_sums = rounding if found.dtype == dtype else 1e-5
    assert difference(found.astype(mx.float32).sum(axis=0), expected(x, layer)) < of_sums
    kernels.begins_early = True
    assert mx.array_equal(quantized_gemm(x, layer, is_whole=numbers["splits"] == 1), found).item()


MUTATIONS = [
    ("__byte_perm(of_row.x, of_row.z, 0x7632)", "__byte_perm(of_row.x, of_row.z, 0x5410)"),
    ("reinterpret_cast<const T*>(given_scales + chunk / SPAN % SLOTS", "reinterpret_cast<const T*>(given_scales + 0"),
    ('wait_group %0;" ::"n"(STAGES - 2)', 'wait_group %0;" ::"n"(STAGES - 1)'),
]


@needs_compiler
@pytest.mark.cpu
def test_another_line_is_found(kernels: CpuKernels, follow: Callable[..., None]) -> None:
    follow(wide=1, tall=1, deep=1, chunk=256, stages=3, splits=2)
    layer = random_layer(2560, 16, 64, mx.float16)  # parts of 5 chunks, which share fetches of 2
    layer.scales *= mx.array([1.0, 3.0] * 20).astype(mx.float16)
    x = mx.random.normal((2, 1, 2560), key=mx.random.key(5)).astype(mx.float16)
    wanted = expected(x, layer)
    assert difference(quantized_gemm(x, layer, is_whole=False).sum(axis=0), wanted) < 2e-3
    for old, new in MUTATIONS:
        kernels.mutation = "quantized_gemm", old, new
        assert difference(quantized_gemm(x, layer, is_whole=False).sum(axis=0), wanted) > 0.02, new


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(("old", "new"), [("T(0x1p113f)", "T(0x1p112f)"), ("0x00f000f0u", "0x000f000fu")])
def test_numbers_below_the_normal_ones_are_scaled(
    old: str, new: str, kernels: CpuKernels, follow: Callable[..., None]
) -> None:
    follow(wide=1, tall=1, deep=1, chunk=256, stages=3, splits=2)
    layer, x = random_layer(1024, 16, 64, mx.bfloat16), mx.random.normal((2, 1, 1024), key=mx.random.key(7))
    x, scales, biases = x.astype(mx.bfloat16), layer.scales, layer.biases
    for factor in (1.0, 2.0**10, 2.0**-30):
        layer.scales, layer.biases = (scales * factor).astype(mx.bfloat16), (biases * factor).astype(mx.bfloat16)
        wanted = expected(x, layer)
        assert difference(quantized_gemm(x, layer, is_whole=False).sum(axis=0), wanted) < 1e-5
    kernels.mutation = "quantized_gemm", old, new
    assert difference(quantized_gemm(x, layer, is_whole=False).sum(axis=0), wanted) > 0.02


@needs_compiler
@pytest.mark.cpu
def test_threads_gate_their_outputs(kernels: CpuKernels, follow: Callable[..., None]) -> None:
    follow(wide=2, tall=1, deep=2, chunk=256)
    layer = random_layer(512, 2 * 24, 64, mx.float16, bias=True)
    x = mx.random.normal((5, 1, 512), key=mx.random.key(1)).astype(mx.float16) / 8
    found = quantized_gemm(x, layer, is_whole=True, is_gated=True)
    wanted = gated(expected(x, layer), mx.float16)
    assert difference(found[0], wanted) < 4e-3
    kernels.mutation = "quantized_gemm", "row % 2 * (outputs / 2)", "row % 2"
    assert difference(quantized_gemm(x, layer, is_whole=True, is_gated=True)[0], wanted) > 0.1


@needs_hopper
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 1.5e-2), (mx.float16, 3e-3)])
@pytest.mark.parametrize(("shape", "group_size"), [((4096, 6144), 64), ((4096, 6144), 32), ((4864, 896), 64)])
def test_the_kernel_agrees_with_unpacked_weights(
    shape: tuple[int, int], group_size: int, dtype: mx.Dtype, tolerance: float
) -> None:
    layer = random_layer(*shape, group_size, dtype)
    for rows in (3, 32, 100, MAX_ROWS):
        x = mx.random.normal((rows, 1, shape[0])).astype(dtype)
        wanted = expected(x, layer)
        for is_whole in (True, False):
            y_SBTO = quantized_gemm(x, layer, is_whole=is_whole)
            assert difference(y_SBTO.astype(mx.float32).sum(axis=0), wanted) < tolerance
        product = quantized_gemm(x, layer, is_whole=True, is_gated=True)
        assert mx.array_equal(product[0], swiglu_of_halves(quantized_gemm(x, layer, is_whole=True)[0])).item()


@needs_hopper
def test_a_row_gets_the_same_numbers_whatever_rows_are_beside_it() -> None:
    layer = random_layer(4096, 1024, 64, mx.bfloat16)
    x = mx.random.normal((32, 1, 4096)).astype(mx.bfloat16)
    alike = quantized_gemm(x, layer, is_whole=True)
    for rows in (17, 31):
        assert mx.array_equal(quantized_gemm(x[:rows], layer, is_whole=True), alike[:, :rows]).item()


def test_other_products_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda: True)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    layer, x = random_layer(256, 64, 64, mx.bfloat16), mx.zeros((4, 1, 256), mx.bfloat16)
    assert fits(x, layer)
    assert fits(mx.zeros((1, MAX_ROWS, 256), mx.bfloat16), layer)
    assert not fits(mx.zeros((1, MAX_ROWS + 1, 256), mx.bfloat16), layer)
    assert not fits(x.astype(mx.float16), layer)
    assert not fits(x, random_layer(256, 64, 64, mx.bfloat16, bits=8))
    assert not fits(x, nn.Linear(256, 64))
    assert not fits(mx.zeros((4, 1, 192), mx.bfloat16), random_layer(192, 64, 64, mx.bfloat16))
    mxfp4 = nn.QuantizedLinear(256, 64, group_size=32, bits=4, mode="mxfp4")
    assert not fits(x, mxfp4)
    monkeypatch.setattr(module, "architecture", lambda: "sm_80")
    assert not fits(x, layer)
