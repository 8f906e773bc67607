"""The kernel is compared with MLX's operations; these cases are skipped without a GPU that has it."""

import math
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.kernels import segmented_lora, warpgroup_gemm
from parallm.model.kernels import small_batch_gemm as module
from parallm.model.kernels.cuda import architecture, captured_launches, on_cuda
from parallm.model.kernels.segmented_lora import GroupOutput, ShrinkOutput
from parallm.model.kernels.small_batch_gemm import (
    MAX_CAPTURED_ROWS,
    MAX_PRODUCTS,
    MAX_ROWS,
    MAX_ROWS_OF_SMALL,
    MAX_VERSIONS,
    MAX_WARPS,
    MIN_STAGES,
    MIN_STAGES_OF_NARROW,
    GemmPlan,
    ShrunkRows,
    WarpPlan,
    can_add,
    fits,
    plan,
    small_batch_gemm,
)
from parallm.model.kernels.swiglu import swiglu_of_halves
from parallm.model.kernels.warpgroup_gemm import MAX_SHARED_BYTES, PROCESSORS, WarpgroupPlan
from parallm.model.lora.segmented import add_products, order_rows
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.lora.test_segmented import Versions, expected, random_versions, split

needs_hopper = pytest.mark.skipif(not on_cuda() or architecture() != "sm_90", reason="needs a Hopper GPU")
SHAPES = {(4096, 6144): 48, (4096, 28672): 32, (14336, 4096): 16, (896, 1152): 48, (4864, 896): 16, (64, 8): 8}
"""Inputs and outputs, and ranks of a version."""


@pytest.mark.parametrize("rows", [2, 8, 9, 32, 33, 64, 100, 128, 129, 512, 1024])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("versions", [0, 1, 16])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_plan_keeps_to_what_a_block_may_have(
    rows: int, shape: tuple[int, int], versions: int, is_whole: bool
) -> None:
    chosen = plan(rows, *shape, SHAPES[shape] * versions, is_whole=is_whole)
    assert chosen.shared_bytes(adds=True) <= MAX_SHARED_BYTES
    assert chosen.threads <= 32 * MAX_WARPS
    assert chosen.splits == 1 or not is_whole
    if isinstance(chosen, WarpgroupPlan):
        assert rows > 32 or not is_whole or shape[1] > 64 * PROCESSORS
        assert chosen.stages >= warpgroup_gemm.MIN_STAGES
        assert chosen.splits <= -(-shape[0] // chosen.chunk)
        return
    assert chosen.rows >= rows
    assert chosen.stages >= (MIN_STAGES if chosen.wide > 1 else MIN_STAGES_OF_NARROW)
    assert chosen.threads % (chosen.chunk // 8) == 0
    assert chosen.deep * 32 <= chosen.chunk


def test_many_numbers_of_rows_have_few_plans() -> None:
    for shape in SHAPES:
        assert len({plan(rows, *shape, 0, is_whole=True) for rows in range(33, MAX_CAPTURED_ROWS + 1)}) <= 5


@pytest.mark.parametrize("versions", [0, 1, 8])
@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 28672), (14336, 4096)])
def test_blocks_of_large_weights_run_at_once(shape: tuple[int, int], versions: int) -> None:
    columns = SHAPES[shape] * versions
    chosen = plan(32, *shape, columns, is_whole=shape[1] > 4096)
    blocks = (-(-shape[1] // chosen.outputs) + -(-columns // chosen.outputs)) * chosen.splits
    assert 90 < blocks <= PROCESSORS


def random_linear(inputs: int, outputs: int, *, bias: bool, dtype: mx.Dtype) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.set_dtype(dtype)
    return linear


@needs_hopper
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 2e-2), (mx.float16, 4e-3)])
@pytest.mark.parametrize(
    ("rows", "tokens", "inputs", "widths", "ranks", "versions", "bias"),
    [
        (2, 1, 64, [64], [8], 1, False),
        (5, 1, 896, [896, 128, 128], [16, 16, 16], 0, True),
        (5, 1, 896, [896, 128, 128], [16, 16, 16], 1, True),
        (32, 1, 4096, [4096, 1024, 1024], [16, 16, 16], 8, False),
        (33, 1, 992, [72, 200], [8, 24], 3, False),
        (64, 1, 4864, [896], [64], 2, True),
        (1, 57, 896, [4864, 4864], [16, 16], 1, False),
        (32, 1, 4096, [14336, 14336], [16, 16], 8, False),
        (17, 1, 14336, [4096], [16], 1, False),
        (32, 1, 14336, [4096], [16], 0, False),
        (3, 9, 928, [40, 48], [8, 16], 2, False),
        (32, 1, 4096, [4096], [16], MAX_VERSIONS + 1, False),
        (128, 1, 896, [896, 128, 128], [16, 16, 16], 1, True),
        (128, 1, 4864, [896], [16], 3, False),
        (200, 1, 896, [4864, 4864], [16, 16], 0, False),
        (256, 1, 1536, [1536, 256, 256], [16, 16, 16], 2, True),
        (500, 1, 4864, [896], [16], 1, False),
        (1000, 1, 896, [896, 128, 128], [16, 16, 16], 0, True),
    ],
)
def test_the_kernel_agrees_with_the_operations(
    dtype: mx.Dtype,
    tolerance: float,
    rows: int,
    tokens: int,
    inputs: int,
    widths: list[int],
    ranks: list[int],
    versions: int,
    bias: bool,
) -> None:
    mx.random.seed(rows * tokens)
    x = (mx.random.normal((rows, tokens, inputs)) / 8).astype(dtype)
    linear = random_linear(inputs, sum(widths), bias=bias, dtype=dtype)
    made = random_versions(inputs, widths, ranks, versions, dtype) if versions else None
    index = [(row * 7) % (versions + 1) - 1 if versions > 1 else 0 for row in range(rows)]
    with captured_launches():
        assert fits(x, linear)

    y_SBTO, hidden = small_batch_gemm(x, linear, made.weights if made else None, is_whole=len(widths) > 1)

    y = x.astype(mx.float32) @ linear.weight.astype(mx.float32).T + (linear.bias if bias else 0)
    assert y_SBTO.shape[0] == 1 or len(widths) == 1
    assert_near(y_SBTO.astype(mx.float32).sum(axis=0), y, tolerance)
    if hidden is None:
        assert versions in (0, MAX_VERSIONS + 1)
        return
    assert made is not None
    every = mx.concatenate([x.astype(mx.float32) @ a_IK.astype(mx.float32) for a_IK in made.a_IK], axis=-1)
    assert_near(hidden.sum(axis=0), every, tolerance)
    lora = ShrinkOutput(weights=made.weights, order_B2=order_rows(index, versions), hidden_PBTK=hidden)
    products, wanted = GroupOutput(y_SBTO, dtype, widths, lora), expected(y, x, widths, ranks, made, index)
    for one, other in zip(products.split(), wanted, strict=True):
        assert_near(one, other, tolerance)
    if len(widths) == 1:
        assert_near(products.added_to(2 * x[..., :1] + y.astype(dtype)), wanted[0] + 2 * x[..., :1] + y, tolerance)


def assert_near(found: mx.array, wanted: mx.array, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert mx.abs(found.astype(mx.float32) - wanted).max().item() <= tolerance * mx.abs(wanted).max().item()


def gated(x: mx.array, linear: nn.Linear) -> mx.array:
    """SwiGLU of the product's halves, each rounded before."""
    y = x.astype(mx.float32) @ linear.weight.astype(mx.float32).T + linear.get("bias", 0)
    gate, up = mx.split(y.astype(x.dtype).astype(mx.float32), 2, axis=-1)
    return nn.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Case:
    """A plan of several chunks, more than are under way at once, and of several warps in both directions."""

    plan: GemmPlan
    begins_early: bool
    has_bias: bool
    has_mutants: bool = False

    @property
    def rows(self) -> int:
        """More than a block has, where there may be several."""
        return 13 if isinstance(self.plan, WarpPlan) else self.plan.rows + 13


CASES = {
    "few rows": Case(WarpPlan(tiles=2, wide=3, deep=2, chunk=64, stages=3, splits=1), False, True, True),
    "few rows, early": Case(WarpPlan(tiles=2, wide=3, deep=2, chunk=64, stages=3, splits=1), True, False),
    "three warpgroups": Case(WarpgroupPlan(rows=64, wide=3, stages=4, splits=1), True, True, True),
    "many rows": Case(WarpgroupPlan(rows=128, wide=1, stages=3, splits=1), False, True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case) -> CpuKernels:
    """Runs all products by the plan of the case."""
    made = CpuKernels(tmp_path)
    made.begins_early = case.begins_early
    monkeypatch.setattr(module, "kernel", made)
    monkeypatch.setattr(module, "plan", lambda *_, **__: case.plan)
    return made


INPUTS = 352
"""Of products on a CPU: five chunks and a half."""


@needs_compiler
def test_threads_gate_their_outputs(case: Case, kernels: CpuKernels) -> None:
    linear = random_linear(INPUTS, 2 * 72, bias=case.has_bias, dtype=mx.float16)
    x = mx.random.normal((case.rows, 1, INPUTS), key=mx.random.key(1)).astype(mx.float16)
    y_SBTO, hidden = small_batch_gemm(x, linear, None, is_whole=True, is_gated=True)
    assert hidden is None
    assert_near(y_SBTO[0].astype(mx.float32), gated(x, linear), 2e-3)
    kernels.mutation = case.plan.kernel, "row % 2 * (outputs / 2)", "row % 2"
    wrong, _ = small_batch_gemm(x, linear, None, is_whole=True, is_gated=True)
    assert mx.abs(wrong[0].astype(mx.float32) - gated(x, linear)).max().item() > 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plus:
    """A product and LoRA after A."""

    x: mx.array
    linear: nn.Linear
    added: ShrunkRows
    versions: Versions

    def wanted(self) -> mx.array:
        """Both together, in float32."""
        y = self.x.astype(mx.float32) @ self.linear.weight.astype(mx.float32).T + self.linear.get("bias", 0)
        ranks = self.versions.weights.layout.ranks
        columns = mx.split(
            self.added.shrunk_BK.astype(mx.float32), [sum(ranks[: i + 1]) for i in range(len(ranks) - 1)], 1
        )
        products = [one @ b.astype(mx.float32) for one, b in zip(columns, self.versions.b_RO[0], strict=True)]
        return y + mx.concatenate(products, axis=1)[:, None]

    def furthest(self, *, is_gated: bool = False) -> float:
        """The largest difference over the largest number; NaN, which a mutant may read behind weights, is the most."""
        found, _ = small_batch_gemm(self.x, self.linear, None, is_whole=True, is_gated=is_gated, added=self.added)
        wanted = self.wanted()
        if is_gated:
            gate, up = mx.split(wanted.astype(self.x.dtype).astype(mx.float32), 2, axis=-1)
            wanted = nn.silu(gate) * up
        assert found.shape == (1, *wanted.shape)
        distance: float = (mx.abs(found[0].astype(mx.float32) - wanted).max() / mx.abs(wanted).max()).item()
        return math.inf if math.isnan(distance) else distance


def random_plus(rows: int, inputs: int, widths: list[int], ranks: list[int], *, bias: bool, dtype: mx.Dtype) -> Plus:
    mx.random.seed(rows)
    versions = random_versions(inputs, widths, ranks, 1, dtype)
    return Plus(
        x=(mx.random.normal((rows, 1, inputs)) / 8).astype(dtype),
        linear=random_linear(inputs, sum(widths), bias=bias, dtype=dtype),
        added=ShrunkRows(weights=versions.weights, shrunk_BK=mx.random.normal((rows, sum(ranks))).astype(dtype)),
        versions=versions,
    )


MUTANTS = {
    "small_batch_gemm": {
        "the next target's ranks": ("r -= rank;", ""),
        "the next target's outputs": ("output -= own_width;", ""),
        "B of the first target": ("start = starts_of[s]", "start = starts_of[0]"),
        "another target's ranks count": ("r >= 0 && r < rank", "r >= 0 && r < K"),
        "rows of other rows": ("int64_t(row) * K + k", "k"),
        "some of the ranks": ("units = COLUMNS / 32", "units = 1"),
        "the first chunk again": ("i = chunk * CHUNK + column * 8", "i = column * 8"),
        "the first chunk alone": ("chunk < end && i < width", "chunk < 1 && i < width"),
        "the first warp's part of sums": ("d < PARTS", "d < 1"),
    },
    "warpgroup_gemm": {
        "the next target's ranks": ("r -= rank;", ""),
        "the next target's outputs": ("output -= own_width;", ""),
        "B of the first target": ("target = s", "target = 0"),
        "another target's ranks count": ("r >= 0 && r < rank", "r >= 0 && r < K"),
        "the first block's ranks": ("int64_t(above + row) * K", "int64_t(row) * K"),
        "some of the ranks": ("k < DEEP", "k < 1"),
        "the first chunk again": ("at = chunk * CHUNK;", "at = 0;"),
        "the first chunk alone": ("chunk < end", "chunk < 1"),
        "the first block's rows": ("x + int64_t(above + line)", "x + int64_t(line)"),
        "the first block's place": ("all_rows + above", "all_rows"),
        "all rows are in one block": ("blockIdx.x % row_blocks", "0"),
        "copies are not shown": ("show_copies();", ""),
        "products are not waited for": ("wait_products<0>();", ""),
        "outputs lie as they come": ("place / 16 * 16 + place % 8 * 2 + place % 16 / 8", "place"),
    },
}
"""By kernel, whatever its plan is."""
HALVES = {"small_batch_gemm": "SIDE", "warpgroup_gemm": "HALF"}


@needs_compiler
def test_threads_add_what_comes_after_a(case: Case, kernels: CpuKernels) -> None:
    three = random_plus(case.rows, INPUTS, [40, 16, 24], [16, 8, 24], bias=case.has_bias, dtype=mx.float16)
    assert three.furthest() < 2e-3
    pair = random_plus(case.rows, INPUTS, [72, 72], [16, 24], bias=case.has_bias, dtype=mx.float16)
    assert pair.furthest(is_gated=True) < 2e-3
    for mutant in MUTANTS[case.plan.kernel].values() if case.has_mutants else ():
        kernels.mutation = (case.plan.kernel, *mutant)
        assert three.furthest() > 0.05, mutant
    kernels.mutation = case.plan.kernel, f"of_tile / {HALVES[case.plan.kernel]} * (outputs / 2)", "0"
    assert pair.furthest(is_gated=True) > 0.05


@needs_compiler
def test_threads_multiply_by_a_of_all_versions(case: Case, kernels: CpuKernels) -> None:
    linear, x = random_linear(INPUTS, 72, bias=True, dtype=mx.float16), mx.random.normal((case.rows, 1, INPUTS))
    versions = random_versions(INPUTS, [40, 32], [16, 8], 3, mx.float16)

    def furthest() -> float:
        y_SBTO, hidden = small_batch_gemm(x.astype(mx.float16), linear, versions.weights, is_whole=True)
        assert hidden is not None
        wanted = mx.concatenate([x @ a_IK.astype(mx.float32) for a_IK in versions.a_IK], axis=-1)
        plain = x @ linear.weight.astype(mx.float32).T + linear.bias
        pairs = (hidden[0], wanted), (y_SBTO[0].astype(mx.float32), plain)
        return max((mx.abs(one - other).max() / mx.abs(other).max()).item() for one, other in pairs)

    assert furthest() < 2e-3
    kernels.mutation = case.plan.kernel, "row / K * jump", "0"
    assert furthest() > 0.05


@needs_compiler
@pytest.mark.parametrize(
    "chosen",
    [
        WarpPlan(tiles=2, wide=3, deep=2, chunk=64, stages=3, splits=4),
        WarpgroupPlan(rows=64, wide=1, stages=4, splits=4),
    ],
    ids=lambda chosen: chosen.kernel,
)
def test_threads_leave_parts_to_be_added(chosen: GemmPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = 13 if isinstance(chosen, WarpPlan) else 77
    kernels = CpuKernels(tmp_path)
    monkeypatch.setattr(module, "kernel", kernels)
    monkeypatch.setattr(module, "plan", lambda *_, **__: chosen)
    linear, x = random_linear(INPUTS, 72, bias=True, dtype=mx.float16), mx.random.normal((rows, 1, INPUTS))
    versions = random_versions(INPUTS, [72], [16], 3, mx.float16)

    def furthest() -> float:
        y_SBTO, hidden = small_batch_gemm(x.astype(mx.float16), linear, versions.weights, is_whole=False)
        assert y_SBTO.shape[0] == 4
        assert hidden is not None
        wanted = mx.concatenate([x @ a_IK.astype(mx.float32) for a_IK in versions.a_IK], axis=-1)
        plain = x @ linear.weight.astype(mx.float32).T + linear.bias
        pairs = (hidden.sum(axis=0), wanted), (y_SBTO.sum(axis=0), plain)
        return max((mx.abs(one - other).max() / mx.abs(other).max()).item() for one, other in pairs)

    assert furthest() < 2e-3
    for old, new in (
        ("blockIdx.y == 0 ? bias : nullptr", "bias"),
        ("begin = chunks * blockIdx.y", "begin = 0 * blockIdx.y"),
    ):
        kernels.mutation = chosen.kernel, old, new
        assert furthest() > 0.01


@needs_hopper
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [2, 31, 64, 100, 128, 200, 500])
@pytest.mark.parametrize(
    ("inputs", "widths", "ranks"),
    [(896, [896, 128, 128], [16] * 3), (896, [4864] * 2, [16] * 2), (1536, [64, 32], [8, 48])],
)
def test_a_gpu_adds_what_comes_after_a(
    inputs: int, widths: list[int], ranks: list[int], rows: int, dtype: mx.Dtype
) -> None:
    plus = random_plus(rows, inputs, widths, ranks, bias=True, dtype=dtype)
    with captured_launches():
        assert can_add(plus.x, plus.linear, plus.versions.weights)
    assert plus.furthest() < 2e-2
    if len(widths) == 2 and widths[0] == widths[1]:
        assert plus.furthest(is_gated=True) < 2e-2


def test_ranks_fit_in_what_is_fetched_at_once(on_hopper: None) -> None:
    for ranks, versions, fits_in in (([64, 64], 1, True), ([256, 256], 1, False), ([8, 8], 2, False)):
        made = random_versions(896, [64, 64], ranks, versions, mx.bfloat16)
        plus = random_plus(4, 896, [64, 64], [8, 8], bias=False, dtype=mx.bfloat16)
        assert can_add(plus.x, plus.linear, made.weights) == fits_in
    assert not can_add(plus.x[:1], plus.linear, plus.versions.weights)


@needs_compiler
@pytest.mark.cpu
def test_kernels_multiply_tokens_by_a_and_lay_b_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, widths, ranks = CpuKernels(tmp_path), [96, 32, 32], [16, 8, 8]
    for one in (segmented_lora, module):
        monkeypatch.setattr(one, "kernel", kernels)
        monkeypatch.setattr(one, "has_kernels", lambda: True)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    versions = random_versions(64, widths, ranks, 1, mx.float16)
    x, y = (mx.random.normal((24, 1, size)).astype(mx.float16) for size in (64, sum(widths)))
    wanted = expected(y, x, widths, ranks, versions, [0] * 24)

    def furthest() -> float:
        found = split(add_products(versions.weights, y, x, mx.zeros(24, mx.int32)), widths)
        return max(mx.abs(one - other).max().item() for one, other in zip(found, wanted, strict=True))

    assert furthest() < 1e-2
    for mutation in (("block_diagonal", "row -= ranks[s]", "row -= 8"), ("block_diagonal", "output -= widths[s]", "")):
        kernels.mutation = mutation
        assert furthest() > 0.1


@needs_hopper
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 2e-2), (mx.float16, 4e-3)])
@pytest.mark.parametrize(("inputs", "widths"), [(4096, [4096, 1024, 1024]), (4096, [14336] * 2), (14336, [4096])])
@pytest.mark.parametrize("count", [1, 3])
def test_prompts_agree_with_the_operations(
    inputs: int,
    widths: list[int],
    count: int,
    dtype: mx.Dtype,
    tolerance: float,
) -> None:
    ranks, index = [16] * len(widths), [token % (count + 1) - 1 if count > 1 else 0 for token in range(512)]
    versions = random_versions(inputs, widths, ranks, count, dtype)
    x, y = (mx.random.normal((512, 1, size)).astype(dtype) / 8 for size in (inputs, sum(widths)))
    found = split(add_products(versions.weights, y, x, mx.array(index, mx.int32)), widths)
    for one, wanted in zip(found, expected(y, x, widths, ranks, versions, index), strict=True):
        assert_near(one, wanted, tolerance)


@needs_hopper
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [2, 12, 32, 64, 300])
def test_the_gated_product_has_the_bits_of_both_kernels(rows: int, dtype: mx.Dtype) -> None:
    linear = random_linear(4096, 2 * 1408, bias=False, dtype=dtype)
    x = mx.random.normal((rows, 1, 4096)).astype(dtype)
    y_SBTO, _ = small_batch_gemm(x, linear, None, is_whole=True)
    found, _ = small_batch_gemm(x, linear, None, is_whole=True, is_gated=True)
    assert mx.array_equal(found[0], swiglu_of_halves(y_SBTO[0])).item()


@needs_hopper
def test_a_row_gets_the_same_numbers_whatever_rows_are_beside_it() -> None:
    linear = random_linear(4096, 1024, bias=False, dtype=mx.bfloat16)
    x = mx.random.normal((32, 1, 4096)).astype(mx.bfloat16)
    alike, _ = small_batch_gemm(x, linear, None, is_whole=True)
    for rows in (25, 31):
        few, _ = small_batch_gemm(x[:rows], linear, None, is_whole=True)
        assert mx.array_equal(few, alike[:, :rows]).item()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda: True)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")


def test_other_products_are_left_to_mlx(on_hopper: None) -> None:
    linear, x = random_linear(64, 64, bias=False, dtype=mx.bfloat16), mx.zeros((4, 1, 64), mx.bfloat16)
    assert fits(x, linear)
    assert not fits(x[:1], linear)
    assert not fits(mx.zeros((MAX_ROWS_OF_SMALL + 1, 1, 64), mx.bfloat16), linear)
    assert not fits(x.astype(mx.float32), random_linear(64, 64, bias=False, dtype=mx.float32))
    assert not fits(x, nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4))


@pytest.mark.parametrize("hidden", [64, 2048, 4096])
def test_all_products_of_a_layer_are_captured_or_none(hidden: int, on_hopper: None) -> None:
    layer = [
        random_linear(inputs, outputs, bias=False, dtype=mx.bfloat16)
        for inputs, outputs in (
            (hidden, hidden + 512),
            (hidden, hidden),
            (hidden, 7 * hidden),
            (7 * hidden // 2, hidden),
        )
    ]
    most = min(MAX_CAPTURED_ROWS, MAX_PRODUCTS // hidden**2)

    def taken(rows: int) -> list[bool]:
        return [fits(mx.zeros((rows, 1, linear.weight.shape[1]), mx.bfloat16), linear) for linear in layer]

    with captured_launches():
        assert all(taken(MAX_ROWS) + taken(most))
        assert not any(taken(most + 1))
    assert not all(taken(MAX_ROWS_OF_SMALL + 1))
