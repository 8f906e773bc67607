"""A kernel that waits for a counter, as the source that runs, on a CPU."""

import ctypes

import mlx.core as mx
import pytest

from parallm.model.kernels import wait_until as module
from parallm.model.kernels.cuda import MAX_SHARED_KIBIBYTES
from parallm.model.kernels.wait_until import SHARED_BYTES, wait_until
from parallm.model.kernels.warpgroup_gemm import MAX_SHARED_BYTES
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


def test_its_processor_has_all_of_its_memory_shared_and_room_for_a_product() -> None:
    kibibyte, blocks, smaller = 1024, 32, 196  # each block takes one more; as many fit; the next smaller division
    of_wait, of_product = (size + kibibyte for size in (SHARED_BYTES, MAX_SHARED_BYTES))
    assert of_wait + of_product <= (MAX_SHARED_KIBIBYTES[90] + 1) * kibibyte
    assert blocks * of_wait > smaller * kibibyte
