"""The gradient of a norm with a frozen weight against MLX's: the kernel's source on a CPU, the kernel on a GPU."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.kernels import rms_norm as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.rms_norm import fits, rms_norm
from parallm.model.patches.forward import FusedNorm
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
EPS = 1e-5
TOLERANCES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
DTYPES = [mx.float32, mx.bfloat16 if on_cuda() else mx.float16]


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", compiled)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    return compiled


def given(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Rows, a weight, and the gradient of the norm."""
    keys = mx.random.split(mx.random.key(3), 3)
    x, slopes = (mx.random.normal(shape, key=key).astype(dtype) for key in keys[:2])
    return x, mx.random.normal(shape[-1:], key=keys[2]).astype(dtype), slopes


def difference(shape: tuple[int, ...], dtype: mx.Dtype) -> float:
    """The largest of the gradient of `rms_norm` from that of MLX's in float32, over the largest number of the latter;
    infinite if the norms differ."""
    x, weight, slopes = given(shape, dtype)
    found, (of_x,) = mx.vjp(lambda x: rms_norm(x, weight, EPS), [x], [slopes])
    wide = [array.astype(mx.float32) for array in (x, weight, slopes)]
    _, (expected,) = mx.vjp(lambda x: mx.fast.rms_norm(x, wide[1], EPS), [wide[0]], [wide[2]])
    assert of_x.dtype == dtype
    if not mx.array_equal(found[0], mx.fast.rms_norm(x, weight, EPS)):
        return float("inf")
    return (mx.abs(of_x - expected).max() / mx.abs(expected).max()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 128), (3, 896), (2, 3, 1536), (1, 2, 5120), (3, 8192)])
@pytest.mark.usefixtures("kernels")
def test_the_gradient_is_that_of_the_norm(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    assert fits(*given(shape, dtype)[:2])
    assert difference(shape, dtype) <= TOLERANCES[dtype]


@pytest.mark.usefixtures("kernels")
def test_other_rows_are_left_to_mlx() -> None:
    x, weight, _ = given((3, 64), mx.float16)
    assert fits(x, weight)
    assert not fits(x, weight.astype(mx.float32))
    assert not fits(x[:0], weight)
    assert not fits(*given((3, 60), mx.float16)[:2])
    assert not fits(*given((1, 1 << 15), mx.float16)[:2])
    assert not fits(mx.zeros(()), weight)


@pytest.mark.usefixtures("kernels")
def test_a_norm_of_a_model_takes_it_while_lora_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = nn.RMSNorm(64), mx.random.normal((2, 64))
    expected = norm(x)
    norm.__class__ = FusedNorm
    taken = list[tuple[int, ...]]()

    def noted(x: mx.array, *_: object) -> mx.array:
        taken.append(x.shape)
        return x

    monkeypatch.setattr(module, "_gradient", noted)
    for is_trained in (False, True):
        norm.is_trained = lambda is_trained=is_trained: is_trained
        (found,), _ = mx.vjp(norm, [x], [x])
        assert mx.array_equal(found, expected)
        assert taken == ([x.shape] if is_trained else [])


@pytest.mark.usefixtures("kernels")
def test_whoever_trains_the_weight_hears_of_it() -> None:
    x, weight, _ = given((2, 64), mx.float32)
    assert mx.isnan(mx.grad(lambda weight: rms_norm(x, weight, EPS).sum())(weight)).all()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("of_normed[c][j] - along", "of_normed[c][j] + along"),
        ("sums[1][warp]", "sums[1][0]"),
        ("(x + row * SIZE)", "(x)"),
        ("* float(factors.values[j])", ""),
    ],
)
def test_another_arithmetic_is_found(kernels: CpuKernels, old: str, new: str) -> None:
    kernels.mutation = "rms_norm_gradient", old, new
    assert difference((3, 1536), mx.float32) > 1e-3
