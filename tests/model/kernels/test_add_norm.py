"""A residual add with its norm: the order of its sums, and on CUDA the bits of MLX's operations."""

from pathlib import Path

import mlx.core as mx
import pytest

from parallm.model.kernels import add_norm as module
from parallm.model.kernels.add_norm import add_norm, fits, threads_and_chunks
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.lora.segmented import order_rows
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.lora.test_segmented import expected, random_versions


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


def with_lora(rows: int, size: int, rank: int, splits: int, dtype: mx.Dtype) -> tuple[list[mx.array], mx.array]:
    """What `add_norm` gives for rows of three versions and of none, and the same by operations in float32."""
    versions = random_versions(64, [size], [rank], 3, dtype)
    index = [row % 4 - 1 for row in range(rows)]
    parts_SB1H = mx.random.normal((splits, rows, 1, size)).astype(dtype if splits == 1 else mx.float32)
    stream_B1H, weight_H = mx.random.normal((rows, 1, size)).astype(dtype), mx.random.normal((size,)).astype(dtype)
    x_B1I = mx.random.normal((rows, 1, 64)).astype(dtype)
    hidden = mx.concatenate([x_B1I.astype(mx.float32) @ a.astype(mx.float32) for a in versions.a_IK], axis=-1)
    hidden_2B1K = mx.stack([hidden / 4, hidden * 3 / 4])
    lora = ShrinkOutput(weights=versions.weights, order_B2=order_rows(index, 3), hidden_PBTK=hidden_2B1K)
    found = add_norm(parts_SB1H, stream_B1H, weight_H, 1e-5, lora)
    y_B1H = parts_SB1H.astype(mx.float32).sum(axis=0) + stream_B1H
    (wanted_B1H,) = expected(y_B1H, x_B1I, [size], [rank], versions, index)
    return [*found, mx.fast.rms_norm(found[0], weight_H, 1e-5)], wanted_B1H


@needs_compiler
@pytest.mark.cpu
def test_threads_add_the_lora_of_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CpuKernels(tmp_path)
    monkeypatch.setattr(module, "kernel", kernels)
    (sums, normed, expected_norm), wanted = with_lora(7, 640, 16, 2, mx.float16)
    assert mx.allclose(sums, wanted, atol=2e-2)
    assert mx.allclose(normed, expected_norm, atol=1e-2)
    kernels.mutation = "add_norm", "= order[blockIdx.x * 2];", "= blockIdx.x;"
    (sums, *_), wanted = with_lora(7, 640, 16, 2, mx.float16)
    assert not mx.allclose(sums, wanted, atol=0.2)


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 2e-2), (mx.float16, 4e-3)])
@pytest.mark.parametrize("size", [512, 896, 4096, 8192])
@pytest.mark.parametrize(("rows", "rank", "splits"), [(1, 8, 1), (32, 16, 4), (200, 64, 2)])
def test_the_kernel_adds_lora(rows: int, rank: int, splits: int, size: int, dtype: mx.Dtype, tolerance: float) -> None:
    (sums, normed, expected_norm), wanted = with_lora(rows, size, rank, splits, dtype)
    assert mx.abs(sums.astype(mx.float32) - wanted).max().item() <= tolerance * mx.abs(wanted).max().item()
    assert mx.abs(normed.astype(mx.float32) - expected_norm.astype(mx.float32)).max().item() <= 0.04
