"""Kernels of a test module, compiled for a CPU."""

import pytest

from tests.model.kernels.cuda_on_cpu import CpuKernels


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(tmp_path_factory.mktemp("kernels"))
