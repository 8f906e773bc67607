"""Products of rows with the weights of their experts: the kernel's source on a CPU, the kernel on a GPU."""

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import grouped_gemm as module
from parallm.model.kernels.cuda import architecture, on_cuda
from parallm.model.kernels.grouped_gemm import (
    MAX_EXPERTS,
    MIN_ROWS,
    ROWS,
    GroupedGemmPlan,
    fits,
    grouped_factors,
    grouped_gemm,
    grouped_gemm_plus,
    list_tiles,
)
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

needs_hopper = pytest.mark.skipif(not on_cuda() or architecture() != "sm_90", reason="needs a Hopper GPU")
WIDE = GroupedGemmPlan(across=4, stages=4, blocks=1)


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", compiled)
    return compiled


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.float16)


def both_ways(counts: list[int], inputs: int, outputs: int, dtype: mx.Dtype = mx.float16) -> tuple[float, float]:
    """How far product and gradient of `counts` rows of each expert are from MLX's, relative to the largest number."""
    experts = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    x, weights, slope = (
        array.astype(dtype)
        for array in (
            normal(1, len(experts), inputs),
            normal(2, len(counts), outputs, inputs) / inputs**0.5,
            normal(3, len(experts), outputs),
        )
    )
    tiles = list_tiles(mx.array(experts), len(counts))
    found = mx.vjp(lambda x: grouped_gemm(x, weights, tiles), [x], [slope])

    def product(x: mx.array) -> mx.array:
        of_rows = weights.astype(mx.float32)[mx.array(experts)]
        return (of_rows @ x[:, :, None])[:, :, 0]

    wanted = mx.vjp(product, [x.astype(mx.float32)], [slope.astype(mx.float32)])
    return difference(found[0][0], wanted[0][0]), difference(found[1][0], wanted[1][0])


def difference(found: mx.array, wanted: mx.array) -> float:
    assert found.shape == wanted.shape
    furthest = (mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()).item()
    return float(furthest) if furthest == furthest else float("inf")


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    "counts", [[0, 128, 1, 0, 257, 0], [300], [0, 0, 5], [1] * 40, [127, 129, 0, 384], [0] * 200 + [7] * 300]
)
def test_tiles_hold_rows_of_one_expert(counts: list[int], kernels: CpuKernels) -> None:
    experts = np.repeat(np.arange(len(counts)), counts)
    tiles = np.array(list_tiles(mx.array(experts), len(counts)))
    assert len(tiles) == len(experts) // ROWS + min(len(counts), len(experts))
    used = -(-np.array(counts) // ROWS).sum()
    assert not tiles[used:].any()
    covered = [row for _, first, rows, _ in tiles[:used] for row in range(first, first + rows)]
    assert covered == list(range(len(experts)))
    for expert, first, rows, _ in tiles[:used]:
        assert 0 < rows <= ROWS
        assert (experts[first : first + rows] == expert).all()


CASES = [
    ([0, 130, 40, 0, 70], 136, 72),
    ([200], 64, 200),
    ([3, 0, 100], 24, 8),
    ([128], 320, 136),
]
"""Rows of each expert, inputs, outputs."""


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(("counts", "inputs", "outputs"), CASES)
def test_threads_multiply_rows_by_the_weights_of_their_experts(
    counts: list[int], inputs: int, outputs: int, kernels: CpuKernels
) -> None:
    assert max(both_ways(counts, inputs, outputs)) < 1e-3


@needs_compiler
@pytest.mark.cpu
def test_wide_blocks_do_the_same(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAN", WIDE)
    assert max(both_ways([20, 100], 264, 288)) < 1e-3


@needs_compiler
@pytest.mark.cpu
def test_factors_have_gradients_too(kernels: CpuKernels) -> None:
    experts = mx.array(np.repeat(np.arange(4, dtype=np.uint32), [30, 0, 2, 50]))
    x, factors, slope = normal(1, 82, 72), normal(2, 4, 72, 8), normal(3, 82, 8)
    tiles = list_tiles(experts, 4)
    found = mx.vjp(lambda x, factors: grouped_factors(x, factors, experts, tiles), [x, factors], [slope])

    def product(x: mx.array, factors: mx.array) -> mx.array:
        return (x[:, None] @ factors[experts])[:, 0]

    wanted = mx.vjp(product, *([array.astype(mx.float32) for array in arrays] for arrays in ([x, factors], [slope])))
    for ours, theirs in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert difference(ours, theirs) < 2e-3


def plus(counts: list[int], inputs: int, outputs: int, rank: int) -> float:
    """How far a product with factors' product added, and the three gradients, are from those by gathered weights."""
    experts = mx.array(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))
    tiles, rows = list_tiles(experts, len(counts)), experts.size
    weights = normal(2, len(counts), outputs, inputs) / inputs**0.5
    primals = [normal(1, rows, inputs), normal(4, rows, rank), normal(5, len(counts), rank, outputs) / rank**0.5]
    slope = normal(3, rows, outputs)
    found = mx.vjp(
        lambda x, hidden, factors: grouped_gemm_plus(x, weights, hidden, factors, experts, tiles), primals, [slope]
    )

    def product(x: mx.array, hidden: mx.array, factors: mx.array) -> mx.array:
        of_rows = weights.astype(mx.float32)[experts]
        return (of_rows @ x[:, :, None])[:, :, 0] + (hidden[:, None] @ factors[experts])[:, 0]

    wanted = mx.vjp(product, *([array.astype(mx.float32) for array in arrays] for arrays in (primals, [slope])))
    pairs = zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True)
    return max(difference(ours, theirs) for ours, theirs in pairs)


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(("counts", "rank"), [([20, 0, 40], 8), ([0, 130, 3], 24)])
def test_factors_are_added_in_one_sum(counts: list[int], rank: int, kernels: CpuKernels) -> None:
    assert plus(counts, 72, 136, rank) < 2e-3


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"), [("(k * 16 + lane % 16) *", "(lane % 16) *"), ("factors += expert", "factors += 0 * expert")]
)
def test_another_line_of_the_sum_is_found(old: str, new: str, kernels: CpuKernels) -> None:
    kernels.mutation = "grouped_gemm", old, new
    assert plus([20, 40], 72, 136, 24) > 0.02


@needs_hopper
def test_the_sum_agrees_with_gathered_weights() -> None:
    assert plus([0, 700, 1, 128, 33, 0, 500], 2048, 768, 16) < 2e-3


MUTATIONS = [
    ("const int64_t first = tile.y", "const int64_t first = tile.y / 128 * 128"),
    ("expert = tile.x;", "expert = 0;"),
    (" && at < depth", ""),
    ("wait_copies<STAGES - 2>();\n        __syncthreads();", "__syncthreads();"),
]


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_another_line_is_found(old: str, new: str, kernels: CpuKernels) -> None:
    kernels.mutation = "grouped_gemm", old, new
    assert max(both_ways([20, 40], 136, 72)) > 0.02


@needs_hopper
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 1e-2), (mx.float16, 2e-3)])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 768), (768, 2048), (1000, 136)])
def test_the_kernel_agrees_with_gathered_weights(inputs: int, outputs: int, dtype: mx.Dtype, tolerance: float) -> None:
    assert max(both_ways([0, 700, 1, 128, 33, 0, 500], inputs, outputs, dtype)) < tolerance


def test_other_products_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.model.kernels.cuda.has_kernels", lambda: True)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    x, weights = mx.zeros((MIN_ROWS, 1, 64), mx.bfloat16), mx.zeros((4, 24, 64), mx.bfloat16)
    assert fits(x, weights)
    assert not fits(x[1:], weights)
    assert not fits(x.astype(mx.float16), weights)
    assert not fits(x.astype(mx.float32), weights.astype(mx.float32))
    assert not fits(x[..., :60], weights[..., :60])
    assert not fits(x, weights[:, :20])
    assert not fits(x, mx.zeros((MAX_EXPERTS + 1, 24, 64), mx.bfloat16))
    with module.without_kernel():
        assert not fits(x, weights)
    monkeypatch.setattr(module, "architecture", lambda: "sm_80")
    assert not fits(x, weights)
