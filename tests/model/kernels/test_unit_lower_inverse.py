"""Inverses of unit lower triangular matrices: the kernel's source on a CPU, the kernel on a GPU, against numpy's."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import unit_lower_inverse as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.unit_lower_inverse import fits, unit_lower_inverse
from parallm.model.recurrence.gated_delta import inverse_unit_lower
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    kernels = CpuKernels(tmp_path)
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", kernels)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    return kernels


def error(products: mx.array) -> float:
    """The largest difference from the inverses in float64, by the largest number."""
    wide = np.tril(np.array(products, np.float64), -1)
    expected = np.linalg.inv(wide + np.eye(wide.shape[-1]))
    return float(np.abs(np.array(unit_lower_inverse(products)) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("size", module.SIZES)
@pytest.mark.usefixtures("kernels")
def test_inverses_are_those_of_numpy(size: int) -> None:
    """What stands on the diagonal and above is not read; blocks are not full."""
    products = 0.3 * mx.random.normal((3, 3, size, size), key=mx.random.key(0))
    assert error(products) <= 1e-6
    assert error(mx.full((1, size, size), 0.98)) <= 1e-5  # keys that repeat
    assert mx.array_equal(inverse_unit_lower(products), unit_lower_inverse(products)).item(), "the rule takes it"


@pytest.mark.cpu
@pytest.mark.parametrize(("old", "new"), [("k < row", "k + 1 < row"), ("value -=", "value +="), ("[matrix]", "[0]")])
def test_another_arithmetic_is_found(kernels: CpuKernels, old: str, new: str) -> None:
    kernels.mutation = "unit_lower_inverse", old, new
    assert error(0.3 * mx.random.normal((3, 16, 16), key=mx.random.key(0))) > 0.01


@pytest.mark.usefixtures("kernels")
def test_matrices_of_other_sizes_are_left_to_the_operations() -> None:
    assert fits(mx.zeros((2, 64, 64)))
    assert not fits(mx.zeros((2, 48, 48)))
    assert not fits(mx.zeros((2, 64, 64), mx.float16))
