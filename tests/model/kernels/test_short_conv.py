"""Convolutions of many tokens: the kernels' source on a CPU, the kernels on a GPU, against operations."""

from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.kernels import short_conv as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.short_conv import fits
from parallm.model.recurrence.rows import PackedRows, Row, using
from parallm.model.recurrence.short_conv import ShortConv
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
ROWS = PackedRows(
    [Row(0, 2), Row(2, 5, after=0), Row(7, 1, after=0), Row(8, 6), Row(14, 3, after=3), Row(17, 1)], num_tokens=21
)
TOLERANCES = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
DTYPES = [mx.float32, mx.bfloat16 if on_cuda() else mx.float16]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    kernels = CpuKernels(tmp_path)
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", kernels)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    return kernels


def convolution(width: int, *, has_bias: bool, dtype: mx.Dtype) -> ShortConv:
    mx.random.seed(width)
    conv = ShortConv(24, 24, width, groups=24, bias=has_bias)
    conv.set_dtype(dtype)
    return conv


def errors(conv: nn.Module, shape: tuple[int, ...], rows: PackedRows | None, patch: pytest.MonkeyPatch) -> list[float]:
    """Largest differences of outputs and of the gradient, by the largest number."""
    dtype = conv.weight.dtype
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
    results = []
    for has_kernel in (True, False):
        if not has_kernel:
            patch.setattr(module, "fits", lambda *_: False)

        def call(x: mx.array) -> mx.array:
            with nullcontext() if rows is None else using(rows):
                outputs: mx.array = conv(x)
            return outputs

        cotangent = mx.random.normal(call(x).shape, key=mx.random.key(2)).astype(dtype)
        results.append([part[0].astype(mx.float32) for part in mx.vjp(call, [x], [cotangent])])
        mx.eval(results[-1])
    pairs = zip(*results, strict=True)
    return [float((mx.abs(one - other).max() / mx.abs(other).max()).item()) for one, other in pairs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (3, True)])
@pytest.mark.usefixtures("kernels")
def test_a_convolution_and_its_gradient_are_those_of_the_operations(
    width: int, has_bias: bool, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = convolution(width, has_bias=has_bias, dtype=dtype)
    assert max(errors(conv, (2, 13, 24), None, monkeypatch)) <= TOLERANCES[dtype]
    monkeypatch.setattr(module, "fits", fits)
    packed = (1, width - 1 + ROWS.num_tokens, 24)
    # tokens of no row are zeros, but for a bias that nothing reads
    assert max(errors(conv, packed, ROWS, monkeypatch)) <= TOLERANCES[dtype]


MUTATIONS = [
    ("short_conv", "j * K + i]", "i * P::size + j]"),
    ("short_conv", "source < 0", "source < 6"),
    ("short_conv_gradient", "i == place", "i == K - 1 - place"),
    ("short_conv_gradient", "at < starts[token + 1]", "at < min(starts[token] + K, starts[token + 1])"),
]


@pytest.mark.cpu
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_line_is_found(
    mutation: tuple[str, str, str], kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.mutation = mutation
    conv = convolution(4, has_bias=False, dtype=mx.float32)
    assert not max(errors(conv, (1, 3 + ROWS.num_tokens, 24), ROWS, monkeypatch)) <= 0.01


@pytest.mark.usefixtures("kernels")
def test_channels_that_fill_no_vectors_are_left_to_the_operations() -> None:
    weight = mx.zeros((24, 4, 1))
    assert fits(mx.zeros((5, 24)), weight, None)
    assert not fits(mx.zeros((5, 23)), weight[:23], None)
    assert not fits(mx.zeros((5, 24)), weight, mx.zeros(24, mx.float16))
