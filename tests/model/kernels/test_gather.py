"""Rows by their indices: the faces against MLX's own indexing; without CUDA, numpy computes what the kernels would."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import gather
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.gather import take_in_groups, take_known_rows, take_rows

DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.uint32)
SIZES = {"uint4": 16, "uint2": 8, "uint32_t": 4, "uint16_t": 2, "uint8_t": 1}


def emulated(name: str, defines: tuple[tuple[str, Any], ...]) -> Any:
    """Stands in for `cuda.kernel`: one thread after the other, by the same arithmetic of indices."""

    def run(inputs: Sequence[mx.array], scalars: Sequence[int], **launch: Any) -> list[mx.array]:
        threads, block = launch["grid"][0], launch["threadgroup"][0]
        assert threads % block == 0
        (shape,), (dtype,) = launch["output_shapes"], launch["output_dtypes"]
        if name == "gather_rows":
            num_rows, width, picks, group = scalars
            source = np.array(inputs[0].view(mx.uint8)).reshape(-1, SIZES[dict(defines)["UNIT"]])
            indices, rows = np.array(inputs[1]), np.zeros((num_rows * width, source.shape[1]), np.uint8)
            for place in range(threads):
                row = place // width
                if row < num_rows:
                    rows[place] = source[(row // picks * group + indices[row]) * width + place % width]
            return [mx.array(rows.reshape(-1)).view(dtype).reshape(shape)]
        cotangents, order, starts = (np.array(array.astype(mx.float32)) for array in inputs)
        gradient = np.zeros(shape, np.float32)
        for row in range(threads // block):
            for reader in range(int(starts[row]), int(starts[row + 1])):
                gradient[row] += cotangents[int(order[reader])]
        return [mx.array(gradient).astype(dtype)]

    return run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels():
        monkeypatch.setattr(gather, "has_kernels", lambda: True)
        monkeypatch.setattr(gather, "kernel", emulated)


def numbers(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return (mx.random.uniform(shape=shape, key=mx.random.key(sum(shape))) * 1000).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 12, 6, 1])
def test_rows_are_those_of_the_indices(width: int, dtype: mx.Dtype) -> None:
    source_NW = numbers((50, width), dtype)
    for indices in (mx.array([[3, 49, 0], [7, 7, 1]]), mx.array([5], mx.uint32), mx.arange(40)):
        assert mx.array_equal(take_rows(source_NW, indices), source_NW[indices]).item()
        assert not mx.array_equal(take_rows(source_NW, indices), source_NW[indices + 1]).item()


@pytest.mark.parametrize("picks", [1, 3])
@pytest.mark.parametrize("width", [128, 5, 1])
def test_each_group_has_its_own_rows(width: int, picks: int) -> None:
    source_GKW = numbers((6, 11, width), mx.float32)
    indices_GM = mx.random.randint(0, 11, (6, picks), key=mx.random.key(1))
    expected = mx.take_along_axis(source_GKW, indices_GM[:, :, None], axis=1)
    assert mx.array_equal(take_in_groups(source_GKW, indices_GM), expected).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("width", [64, 3])
def test_the_gradient_of_a_row_is_the_sum_of_its_readers(width: int, dtype: mx.Dtype) -> None:
    source_NW, indices_M = numbers((9, width), dtype), np.array([8, 2, 2, 0, 8, 2], np.int32)
    cotangent_MW = numbers((6, width), dtype)
    (found,), (gradient,) = mx.vjp(lambda given: take_known_rows(given, indices_M), [source_NW], [cotangent_MW])
    wide = (array.astype(mx.float32) for array in (source_NW, cotangent_MW))
    (expected,), (sums,) = mx.vjp(lambda given: given[mx.array(indices_M)], *([array] for array in wide))
    assert mx.array_equal(found.astype(mx.float32), expected).item()
    assert gradient.dtype == dtype
    assert mx.allclose(gradient.astype(mx.float32), sums, rtol=1e-6 if dtype == mx.float32 else 1e-2).item()
    assert (gradient[1] == 0).all().item(), "a row that nothing reads"
