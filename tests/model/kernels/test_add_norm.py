"""A residual add with its norm: the order of its sums, LoRA as the source that runs, on a CPU, and on CUDA the bits of
MLX's operations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import add_norm as module
from parallm.model.kernels.add_norm import MAX_FACTORS, add_norm, can_shrink, fits, threads_and_chunks
from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.lora.segmented import order_rows
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.lora.test_segmented import Versions, random_versions

EPS = 1e-5
HOPPERS = 227 << 10
"""Bytes of shared memory."""
MUTANTS = {
    "rows without an adapter get one": ("version >= 0 && is_inside", "is_inside"),
    "the first version for all rows": ("* versions + version) * K", "* versions) * K"),
    "rows in their own order": ("SORTED ? order[2 * blockIdx.x] : blockIdx.x", "blockIdx.x"),
    "the first part of a sum": ("p < num_parts", "p < 1"),
    "another group's B": ("+ starts[1]", "+ starts[0]"),
    "a few rows of B": ("total[j] += totals[r]", "if (r % 2) total[j] += totals[r]"),
    "B before it came": ('asm volatile("cp.async.wait_group %0;" ::"n"(SHRINKS) : "memory");', ""),
}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (64, (64, 1)),
        (512, (64, 1)),
        (896, (128, 1)),
        (1536, (64, 3)),
        (2048, (128, 2)),
        (4096, (128, 4)),
        (8192, (128, 8)),
    ],
)
def test_threads_share_a_row_as_in_the_kernel_of_mlx(size: int, expected: tuple[int, int]) -> None:
    """By `dispatch_num_chunks` of its rms_norm.cu."""
    assert threads_and_chunks(size, mx.bfloat16) == expected


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [64, 512, 896, 1536, 4096, 5120, 8192])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (7, 1), (32, 2), (200, 4)])
def test_the_kernel_gives_the_bits_of_an_add_and_a_norm(rows: int, splits: int, size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(size)
    parts_SB1H = mx.random.normal((splits, rows, 1, size)).astype(dtype if splits == 1 else mx.float32)
    stream_B1H, weight_H = mx.random.normal((rows, 1, size)).astype(dtype), mx.random.normal((size,)).astype(dtype)
    assert fits(parts_SB1H, stream_B1H)
    sums_B1H, normed_B1H = add_norm(parts_SB1H, stream_B1H, weight_H, 1e-5)
    total = parts_SB1H[0].astype(mx.float32)
    for part in parts_SB1H[1:]:
        total = total + part
    wanted_B1H = (total + stream_B1H.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(sums_B1H, wanted_B1H).item()
    expected_B1H = mx.fast.rms_norm(sums_B1H, weight_H, 1e-5)
    difference = mx.abs(normed_B1H.astype(mx.float32) - expected_B1H.astype(mx.float32)).max().item()
    equal = (normed_B1H == expected_B1H).mean().item()
    assert equal > 0.999
    assert difference <= 0.04


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("size", [64, 896, 1536, 4096])
def test_a_stream_without_parts_is_normed_as_by_mlx(size: int) -> None:
    stream_B1H, weight_H = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((7, 1, size), (size,)))
    assert fits(None, stream_B1H)
    sums_B1H, normed_B1H = add_norm(None, stream_B1H, weight_H, 1e-5)
    assert mx.array_equal(sums_B1H, stream_B1H).item()
    assert (normed_B1H == mx.fast.rms_norm(stream_B1H, weight_H, 1e-5)).mean().item() > 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that use versions of one target's LoRA, after A."""

    parts_SB1H: mx.array
    stream_B1H: mx.array
    weight_H: mx.array
    lora: ShrinkOutput
    versions: Versions
    index: list[int]
    """The version of each row, -1 for none."""


def random_rows(index: list[int], *, size: int, rank: int, splits: int, versions: int) -> Rows:
    mx.random.seed(size + rank)
    made, half = random_versions(64, [size], [rank], versions, mx.float16), mx.float16
    hidden_PBTK = mx.random.normal((3, len(index), 1, versions * rank))
    parts_SB1H = mx.random.normal((splits, len(index), 1, size)).astype(half if splits == 1 else mx.float32)
    stream_B1H = mx.random.normal((len(index), 1, size)).astype(half)
    weight_H = mx.random.normal((size,)).astype(half)
    mx.eval(hidden_PBTK, parts_SB1H, stream_B1H, weight_H)
    return Rows(
        parts_SB1H=parts_SB1H,
        stream_B1H=stream_B1H,
        weight_H=weight_H,
        lora=ShrinkOutput(weights=made.weights, order_B2=order_rows(index, versions), hidden_PBTK=hidden_PBTK),
        versions=made,
        index=index,
    )


def expected_sums(rows: Rows) -> np.ndarray:
    """(B, 1, H) in float32."""
    total_B1H = np.array(rows.parts_SB1H, np.float32).sum(0) + np.array(rows.stream_B1H, np.float32)
    hidden_BVK = np.array(rows.lora.hidden_PBTK.sum(0)).reshape(len(rows.index), len(rows.versions.b_RO), -1)
    for row, version in enumerate(rows.index):
        if version >= 0:
            total_B1H[row] += hidden_BVK[row, version] @ np.array(rows.versions.b_RO[version][0], np.float32)
    return total_B1H


def agrees(rows: Rows) -> bool:
    given = rows.parts_SB1H, rows.stream_B1H, rows.weight_H, EPS
    sums_B1H, normed_B1H = (np.array(array, np.float32) for array in add_norm(*given, lora=rows.lora))
    scale_B11 = 1 / np.sqrt(np.square(sums_B1H).mean(-1, keepdims=True) + EPS)
    wanted_B1H = np.array(rows.weight_H, np.float32) * sums_B1H * scale_B11
    are_sums_right = np.allclose(sums_B1H, expected_sums(rows), rtol=4e-3, atol=4e-3)
    return are_sums_right and np.allclose(normed_B1H, wanted_B1H, rtol=4e-3, atol=4e-3)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    made = CpuKernels(tmp_path)
    monkeypatch.setattr(module, "kernel", made)
    monkeypatch.setattr(module, "max_shared_bytes", lambda: HOPPERS)
    return made


CASES: dict[str, Callable[[], Rows]] = {
    "one version": lambda: random_rows([0, 0, -1, 0], size=896, rank=16, splits=2, versions=1),
    "three versions": lambda: random_rows([2, 0, -1, 1, 2], size=64, rank=24, splits=1, versions=3),
    "a short rank": lambda: random_rows([1, 0], size=1536, rank=8, splits=4, versions=2),
}


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_lora_is_part_of_the_sum(case: str, kernels: CpuKernels) -> None:
    assert agrees(CASES[case]())


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_adds_lora(case: str) -> None:
    assert agrees(CASES[case]())


@needs_compiler
@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(MUTANTS)]
)
def test_what_forgets_a_part_of_lora_is_found(mutant: str, kernels: CpuKernels) -> None:
    kernels.mutation = ("add_norm", *MUTANTS[mutant])
    assert not agrees(random_rows([2, 0, -1, 1, 2], size=64, rank=24, splits=1, versions=3))


SHRINK_CASES: dict[str, tuple[list[int], int, list[int]]] = {
    "a row without a version": ([0, -1, 0], 896, [16, 8, 8]),
    "short rows": ([0, 0], 64, [8]),
    "rows that MLX's threads share by several vectors": ([0], 1536, [16, 24]),
}
"""Versions of rows, size, and ranks of the targets that follow."""
SHRINK_MUTANTS = {
    "rows without a version get one": ("if (has_version)", "if (true)"),
    "the first lines of A": ("first < SHRUNK", "first < 4"),
    "the first vectors of a row": ("v < SIZE / P::size; v += 32", "v < 32; v += 32"),
    "another group's A": ("next_factors + next_starts[0]", "next_factors"),
    "A before it came": ('asm volatile("cp.async.wait_group 0;" ::: "memory");', ""),
    "the row before its norm": ("line[threadIdx.x] = values", "line[threadIdx.x] = stream"),
}


def shrinks(index: list[int], size: int, ranks: list[int]) -> bool:
    """Whether the norm comes as without, and its products with A as they should."""
    rows = random_rows(index, size=size, rank=16, splits=2, versions=1)
    following = random_versions(size, [32] * len(ranks), ranks, 1, mx.float16)
    given = rows.parts_SB1H, rows.stream_B1H, rows.weight_H, EPS
    assert can_shrink(rows.stream_B1H, rows.lora, following.weights)
    pairs = following.weights, rows.lora.order_B2
    found = [np.array(array, np.float32) for array in add_norm(*given, lora=rows.lora, following=pairs)]
    plain = [np.array(array, np.float32) for array in add_norm(*given, lora=rows.lora)]
    wanted_BK = found[1][:, 0] @ np.array(following.a_IK[0], np.float32) * (np.array(index)[:, None] >= 0)
    are_plain = all(np.array_equal(one, other) for one, other in zip(plain, found, strict=False))
    return are_plain and np.allclose(found[2], wanted_BK, rtol=4e-3, atol=4e-3)


@needs_compiler
@pytest.mark.parametrize("case", SHRINK_CASES)
def test_the_norm_is_multiplied_by_the_next_a(case: str, kernels: CpuKernels) -> None:
    assert shrinks(*SHRINK_CASES[case])


@needs_compiler
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stream_without_parts_is_multiplied_by_the_next_a(is_whole: bool, kernels: CpuKernels) -> None:
    """`is_whole`: False is the control, in which a part was forgotten."""
    rows = random_rows([0, -1, 0], size=896, rank=16, splits=1, versions=1)
    following = random_versions(896, [32, 32], [16, 8], 1, mx.float16)
    sums_B1H, normed_B1H, shrunk_BK = add_norm(
        None if is_whole else rows.parts_SB1H,
        rows.stream_B1H,
        rows.weight_H,
        EPS,
        following=(following.weights, rows.lora.order_B2),
    )
    assert mx.array_equal(sums_B1H, rows.stream_B1H).item() == is_whole
    normed_BH = np.array(mx.fast.rms_norm(rows.stream_B1H, rows.weight_H, EPS), np.float32)[:, 0]
    assert np.allclose(np.array(normed_B1H, np.float32)[:, 0], normed_BH, rtol=4e-3, atol=4e-3) == is_whole
    wanted_BK = normed_BH @ np.array(following.a_IK[0], np.float32) * np.array([1, 0, 1])[:, None]
    assert np.allclose(np.array(shrunk_BK, np.float32), wanted_BK, rtol=4e-3, atol=4e-3) == is_whole


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("case", SHRINK_CASES)
def test_a_gpu_multiplies_by_the_next_a(case: str) -> None:
    assert shrinks(*SHRINK_CASES[case])


@needs_compiler
@pytest.mark.parametrize("mutant", SHRINK_MUTANTS)
def test_what_forgets_a_part_of_a_is_found(mutant: str, kernels: CpuKernels) -> None:
    kernels.mutation = ("add_norm", *SHRINK_MUTANTS[mutant])
    assert not shrinks(*SHRINK_CASES["a row without a version"])


def test_a_block_holds_only_a_small_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "max_shared_bytes", lambda: HOPPERS)
    stream_B1H = mx.zeros((2, 1, 2048), mx.float16)
    for ranks, versions, is_small in (([16, 16, 16], 1, True), ([16, 16, 24], 1, False), ([8], 2, False)):
        following = random_versions(2048, [32] * len(ranks), ranks, versions, mx.float16)
        assert can_shrink(stream_B1H, None, following.weights) == is_small
    lora = random_rows([0], size=2048, rank=16, splits=1, versions=1).lora
    for rank, is_small in ((32, True), (40, False)):  # beside B, which has room, too
        assert can_shrink(stream_B1H, lora, random_versions(2048, [32], [rank], 1, mx.float16).weights) == is_small
    assert not can_shrink(stream_B1H[..., :64], None, random_versions(4096, [32], [8], 1, mx.float16).weights)


@pytest.mark.parametrize("size", range(64, 4097, 64))
def test_mlx_is_asked_for_the_room_that_a_block_needs(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the driver for more than the usual 48 KB only where a launch names more than 48,000 bytes."""
    asked: list[int] = []

    def note(name: str, defines: Defines, *, shared_memory: int) -> Callable[..., list[mx.array]]:
        asked.append(shared_memory)
        return lambda *_, output_shapes, output_dtypes, **__: list(map(mx.zeros, output_shapes, output_dtypes))

    monkeypatch.setattr(module, "kernel", note)
    for rank in (8, 16):
        rows = random_rows([0], size=size, rank=rank, splits=1, versions=1)
        add_norm(rows.parts_SB1H, rows.stream_B1H, rows.weight_H, EPS, lora=rows.lora)
        of_row = 2 * size + 4 * rank + 16
        assert asked[-1] >= 2 * rank * size
        assert asked[-1] > 48_000 or asked[-1] + of_row <= 48 << 10
    add_norm(rows.parts_SB1H, rows.stream_B1H, rows.weight_H, EPS)
    assert asked[-1] == 0


def test_a_block_holds_only_a_small_b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda: True)
    most = MAX_FACTORS // 4096
    limits = ((227, most, True), (227, 2 * most, False), (99, most // 2, True), (99, most, False))
    for kibibytes, rank, is_small in limits:
        monkeypatch.setattr(module, "max_shared_bytes", lambda limit=kibibytes << 10: limit)
        rows = random_rows([0], size=4096, rank=rank, splits=1, versions=1)
        assert fits(rows.parts_SB1H, rows.stream_B1H, rows.lora) == is_small
        assert fits(rows.parts_SB1H, rows.stream_B1H)
