"""Which BLAS is loaded, and what is said where none can be. What loads one runs in a process of its own."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallm.device import blas
from parallm.device.settings import DeviceSettings
from parallm.errors import ConfigError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or blas._has_cuda_build(),
    reason="only the CPU build of MLX on Linux takes its BLAS from us",
)
HAS_MKL = any(True for _ in blas._mkl_paths())
needs_mkl = pytest.mark.skipif(not HAS_MKL, reason="no MKL here")

LOAD = """
import ctypes
from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings
report = load_blas(DeviceSettings(blas="mkl"))
"""

PRODUCTS = """
import mlx.core as mx
mx.random.seed(0)
rows, weights = mx.random.normal((512, 256)), mx.random.normal((768, 256))
whole = rows @ weights.T
print(all(mx.array_equal(rows[:num_rows] @ weights.T, whole[:num_rows]).item() for num_rows in (4, 5, 9, 33, 200)))
"""


def run(script: str, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not loaded MLX, on a machine without any BLAS."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_mkl_paths", lambda: iter(()))
    monkeypatch.setattr(blas, "_openblas_paths", lambda: iter(()))
    monkeypatch.setenv("MKL_CBWR", "AUTO")


def load(settings: DeviceSettings) -> blas.BlasReport:
    """`load_blas` without the cache of earlier calls."""
    return blas._load.__wrapped__(settings.blas, is_strict=settings.blas_strict)


@pytest.mark.parametrize("settings", [DeviceSettings(blas="mkl"), DeviceSettings(blas="openblas")])
def test_a_named_library_that_is_missing_is_refused_with_the_way_out(
    settings: DeviceSettings, without_libraries: None
) -> None:
    with pytest.raises(ConfigError, match=f"device.blas={settings.blas}: no such library found; `pip install mkl`"):
        load(settings)


def test_the_reference_library_is_used_with_a_loud_warning(
    without_libraries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = load(DeviceSettings())
    assert (report.name, report.path, report.strict) == ("reference", None, False)
    assert "reference BLAS" in caplog.text
    assert "pip install mkl" in caplog.text


def test_after_mlx_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    with pytest.raises(ConfigError, match="MLX is loaded already"):
        load(DeviceSettings())


def test_the_cuda_build_needs_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "CUDA_BUILDS", ("pytest",))
    assert load(DeviceSettings(blas="mkl")).name == "cuda"


def test_a_library_without_the_functions_of_blas_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "libopenblas.so").write_text("no library")
    assert blas._load_globally(tmp_path / "libopenblas.so") is None
    assert blas._load_globally(Path("libc.so.6")) is None


@needs_mkl
def test_mkl_is_loaded_in_its_strict_mode_with_the_threads_asked_for() -> None:
    script = LOAD + "set_blas_threads(report, 1)\n"
    script += "print(report.name, report.strict, ctypes.CDLL(report.path).MKL_Get_Max_Threads())"
    assert run(script) == ["mkl", "True", "1"]


@needs_mkl
def test_the_users_own_mkl_mode_is_respected() -> None:
    assert run(LOAD + "print(report.strict)", MKL_CBWR="COMPATIBLE") == ["False"]


@needs_mkl
def test_in_strict_mode_a_row_does_not_depend_on_the_number_of_rows() -> None:
    assert run(LOAD + PRODUCTS) == ["True"]


@needs_mkl
def test_a_second_call_with_the_same_settings_returns_the_same_report() -> None:
    script = LOAD + "import mlx.core\nprint(load_blas(DeviceSettings(blas='mkl')) is report)"
    assert run(script) == ["True"]
