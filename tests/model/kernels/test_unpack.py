"""Unpacked weights against arithmetic by hand and MLX's own: the kernel's source on a CPU, the kernel on a GPU."""

import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.model.kernels import unpack
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.unpack import fits, unpack_weights
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    kernels = CpuKernels(tmp_path)
    if not on_cuda():
        monkeypatch.setattr(unpack, "kernel", kernels)
        monkeypatch.setattr(unpack, "has_kernels", lambda: True)
    return kernels


def packed(shape: tuple[int, int], bits: int, group_size: int, dtype: mx.Dtype) -> list[mx.array]:
    weights = mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)
    return list(mx.quantize(weights, group_size=group_size, bits=bits))


def by_hand(arrays: list[mx.array], bits: int, dtype: mx.Dtype) -> mx.array:
    words, scales, biases = np.array(arrays[0]), *(np.array(array.astype(mx.float32)) for array in arrays[1:])
    numbers = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32(2**bits - 1)
    groups = numbers.reshape(*scales.shape, -1).astype(np.float32)
    return mx.array((groups * scales[..., None] + biases[..., None]).reshape(len(words), -1)).astype(dtype)


@pytest.mark.skipif(not on_cuda() and shutil.which("g++") is None, reason="needs g++, or MLX's CUDA build")
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32)])
@pytest.mark.usefixtures("kernels")
def test_weights_are_number_times_scale_plus_bias(bits: int, group_size: int) -> None:
    for dtype in (mx.float16, mx.float32) + ((mx.bfloat16,) if on_cuda() else ()):
        for shape in ((5, 64), (3, 256), (129, 512)):
            arrays, sizes = packed(shape, bits, group_size, dtype), {"group_size": group_size, "bits": bits}
            found = unpack_weights(*arrays, **sizes)
            assert found.dtype == dtype
            # a GPU rounds number x scale + bias once, which shows where the product alone has more than 24 bits
            assert mx.allclose(found, by_hand(arrays, bits, dtype), rtol=0, atol=1e-6 if dtype == mx.float32 else 0)
            assert mx.allclose(found, mx.dequantize(*arrays, **sizes), rtol=2e-2, atol=2e-2)


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"), [("* scale + bias", "* scale - bias"), ("/ GROUP", "/ GROUP + 1"), (" + i / OF_WORD]", "]")]
)
def test_another_arithmetic_is_found(kernels: CpuKernels, old: str, new: str) -> None:
    kernels.mutation = "unpack_weights", old, new
    arrays = packed((8, 512), 8, 64, mx.float16)
    assert not mx.array_equal(unpack_weights(*arrays, group_size=64, bits=8), by_hand(arrays, 8, mx.float16))


@pytest.mark.usefixtures("kernels")
def test_formats_of_other_numbers_are_left_to_mlx() -> None:
    layer = nn.QuantizedLinear(64, 8, bits=4)
    assert fits(layer, layer.scales.dtype)
    assert not fits(layer, mx.float16)
    assert not fits(nn.QuantizedLinear(64, 8, bits=3), mx.float32)
    assert not fits(nn.QuantizedLinear(64, 8, group_size=32, bits=4, mode="mxfp4"), mx.float32)
