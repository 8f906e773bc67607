"""Launches of kernels, without a GPU; and arrays that are made once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from parallm.model.kernels import cuda
from parallm.model.kernels.compiler import CompileError, NoCompiler
from parallm.model.kernels.cuda import Kernel, has_kernels, interned_array

Launches = list[SimpleNamespace]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What MLX was told to launch."""
    told: Launches = []

    def note(**arguments: Any) -> list[mx.array]:
        told.append(SimpleNamespace(**arguments))
        return []

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", note)
    return told


def launch(*scalars: float) -> None:
    made = Kernel("swiglu", b"code", 1000, True)
    made([], scalars, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[], output_dtypes=[])


def test_a_launch_has_its_code_and_its_shared_memory(launches: Launches) -> None:
    launch()
    assert (launches[0].name, launches[0].compiled_source) == ("swiglu", b"code")
    assert (launches[0].shared_memory, launches[0].ensure_row_contiguous) == (1000, True)


def test_scalars_keep_their_types_and_numbers_become_those_of_float32(launches: Launches) -> None:
    """MLX refuses a number that float32 does not have."""
    launch(2**31 - 1, True, 0.1, 0.5)
    assert launches[0].scalars == [2**31 - 1, True, 0.10000000149011612, 0.5]
    assert [type(scalar) for scalar in launches[0].scalars] == [int, bool, float, float]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with MLX's CUDA build on a Hopper GPU, as far as `has_kernels` looks."""
    monkeypatch.setattr(cuda, "on_cuda", lambda: True)
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_90")
    monkeypatch.setattr(cuda, "_compiles", cuda._compiles.__wrapped__)


def test_kernels_run_where_they_can_be_compiled(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []
    monkeypatch.setattr(cuda, "cubin", lambda name, defines, architecture: targets.append(architecture))
    assert has_kernels()
    assert targets == ["sm_90a"]


@pytest.mark.parametrize("error", [NoCompiler("no NVRTC"), CompileError("error: no such header")])
def test_without_a_compiler_a_warning_says_why_kernels_do_not_run(
    error: Exception, gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(cuda, "cubin", fail)
    assert not has_kernels()
    assert str(error) in caplog.text


def test_old_gpus_take_the_operations_of_mlx(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_75")
    monkeypatch.setattr(cuda, "cubin", lambda *_: pytest.fail("compiled"))
    assert not has_kernels()
    assert "sm_75" in caplog.text


def test_other_devices_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "on_cuda", lambda: False)
    monkeypatch.setattr(cuda, "_compiles", lambda: pytest.fail("compiled"))
    assert not has_kernels()


@pytest.mark.parametrize(("gpu_is", "code_is_for"), [("sm_80", "sm_80"), ("sm_89", "sm_89"), ("sm_120", "sm_120a")])
def test_code_is_made_for_all_of_a_gpu(gpu_is: str, code_is_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "architecture", lambda: gpu_is)
    assert cuda.target() == code_is_for


def test_the_same_numbers_are_the_same_array() -> None:
    first = interned_array((0.5, 1.0), mx.float32)
    assert first is interned_array((0.5, 1.0), mx.float32)
    assert first.tolist() == [0.5, 1.0]
    assert first.dtype == mx.float32


def test_numbers_of_another_type_are_others() -> None:
    arrays = [
        interned_array((1, 0), mx.int32),
        interned_array((1, 0), mx.float32),
        interned_array((True, False), mx.bool_),
    ]
    assert [array.dtype for array in arrays] == [mx.int32, mx.float32, mx.bool_]


def test_rows_of_numbers() -> None:
    assert interned_array(((0, -1), (2, 3)), mx.int32).tolist() == [[0, -1], [2, 3]]


@pytest.fixture
def kernels_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Code of every kernel, and MLX's cache."""
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_90")
    monkeypatch.setattr(cuda, "cubin", lambda name, defines, target: f"{name} {defines}".encode())
    monkeypatch.setattr(cuda, "_kernel", cuda._kernel.__wrapped__)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("answer", [[0.73105858], [0.0], RuntimeError("no such module")])
def test_launches_give_a_few_bytes_where_mlx_finds_the_code_by_them(
    answer: list[float] | Exception, kernels_are_made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`answer`: of MLX to the first launch that gives nothing but the bytes."""

    def launch(**arguments: Any) -> list[mx.array]:
        if isinstance(answer, Exception):
            raise answer
        return [mx.full(arguments["output_shapes"][0], answer[0])]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    monkeypatch.setattr(cuda, "_finds_modules", cuda._finds_modules.__wrapped__)
    with cuda.captured_launches() as launches:
        code = cuda.kernel("gather_rows").code
    assert launches == [], "nobody has launched anything who captures it"
    is_found = answer == [0.73105858]
    assert (code == b"gather_rows ()") is not is_found
    assert code is not None
    if is_found:
        assert len(code) < 40
        assert b"gather_rows ()" in {path.read_bytes() for path in kernels_are_made.glob("gather_rows_*.ptx")}


@pytest.mark.skipif(not cuda.on_cuda(), reason="needs MLX's CUDA build")
def test_this_machine_finds_code_by_a_few_bytes() -> None:
    assert cuda._finds_modules()
