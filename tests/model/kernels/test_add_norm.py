"""A residual add with its norm: the order of its sums, and on CUDA the bits of MLX's operations."""

import mlx.core as mx
import pytest

from parallm.model.kernels.add_norm import add_norm, fits, threads_and_chunks
from parallm.model.kernels.cuda import has_kernels


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
