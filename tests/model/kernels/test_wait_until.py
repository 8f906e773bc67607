"""A kernel that waits for a counter, as the source that runs, on a CPU."""

import ctypes

import mlx.core as mx
import pytest

from parallm.model.kernels import wait_until as module
from parallm.model.kernels.wait_until import wait_until
from tests.model.kernels.cuda_on_cpu import CpuKernels, NeverEnds, needs_compiler


@needs_compiler
@pytest.mark.parametrize(
    ("counted", "awaited", "has_come"),
    [(5, 5, True), (6, 5, True), (4, 5, False), (2, (1 << 32) - 3, True), ((1 << 32) - 3, 2, False)],
)
def test_it_ends_when_the_counter_has_come(
    counted: int, awaited: int, has_come: bool, compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kernel", compiled)
    monkeypatch.setattr(module, "POLLS", 100)
    counter = ctypes.c_uint32(counted)
    if has_come:
        mx.eval(wait_until(ctypes.addressof(counter), awaited))
        return
    with pytest.raises(NeverEnds):
        wait_until(ctypes.addressof(counter), awaited)
