"""Gates within chunks: the kernels' source on a CPU, the kernels on a GPU, against operations."""

from pathlib import Path

import mlx.core as mx
import pytest

from parallm.model.kernels import chunk_gates as module
from parallm.model.kernels.chunk_gates import fits
from parallm.model.kernels.cuda import on_cuda
from parallm.model.recurrence.scan import Decay
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    kernels = CpuKernels(tmp_path)
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", kernels)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    return kernels


def errors(log_a: mx.array, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Largest differences of the three products and of the gradient."""

    def products(log_a: mx.array) -> list[mx.array]:
        decay = Decay(log_a)
        return [decay.from_start(), decay.to_end(), decay.between()]

    keys = mx.random.split(mx.random.key(1), 3)
    shapes = [log_a.shape, log_a.shape, (*log_a.shape[:-1], log_a.shape[-2])]
    cotangents = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
    results = []
    for has_kernels in (True, False):
        monkeypatch.setattr(module, "fits", fits if has_kernels else lambda _: False)
        results.append([array for part in mx.vjp(products, [log_a], cotangents) for array in part])
        mx.eval(results[-1])
    return [mx.abs(one - other).max().item() for one, other in zip(*results, strict=True)]


@pytest.mark.parametrize("size", module.SIZES)
@pytest.mark.usefixtures("kernels")
def test_gates_and_their_gradient_are_those_of_the_operations(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log_a = -mx.exp(2 * mx.random.normal((3, 3, size, 1), key=mx.random.key(0)) - 2)
    assert max(errors(log_a, monkeypatch)) <= 2e-5
    assert max(errors(1e4 * log_a, monkeypatch)) <= 2e-5, "all is forgotten"


MUTATIONS = [
    ("chunk_gates", "t <= own ?", "t < own ?"),
    ("chunk_gates_gradient", "own < t ?", "own + 1 < t ?"),
    *(
        pytest.param(mutation, marks=pytest.mark.slow)
        for mutation in (
            ("chunk_gates", "t > own ?", "t >= own ?"),
            ("chunk_gates_gradient", "parts[place][own][i] = sum;", ""),
            ("chunk_gates_gradient", ": ends[place][t]", ": 0.0f"),
        )
    ),
]
"""Each compiles a kernel for a CPU; all but one of each kernel are slow."""


@pytest.mark.cpu
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_line_is_found(
    mutation: tuple[str, str, str], kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.mutation = mutation
    log_a = -mx.random.uniform(shape=(2, 16, 1), key=mx.random.key(0))
    assert max(errors(log_a, monkeypatch)) > 0.01


@pytest.mark.usefixtures("kernels")
def test_gates_of_channels_are_left_to_the_operations() -> None:
    assert fits(mx.zeros((2, 64, 1)))
    assert not fits(mx.zeros((2, 64, 8)))
    assert not fits(mx.zeros((2, 48, 1)))
