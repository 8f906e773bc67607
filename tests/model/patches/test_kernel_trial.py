"""The trials that turn kernels off where they compute something else than the operations."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from parallm.model.kernels import (
    chunk_scan,
    conv_step,
    delta_chunks,
    delta_inputs,
    flash_attention,
    gated_delta_step,
    gated_norm,
    grouped_gemm,
    recurrent,
    short_conv,
    unit_lower_inverse,
)
from parallm.model.kernels.cuda import architecture, on_cuda
from parallm.model.patches import kernel_trial
from parallm.model.recurrence import gated_delta
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
KERNELS = (
    *(chunk_scan, conv_step, delta_chunks, delta_inputs, gated_delta_step, gated_norm, short_conv, unit_lower_inverse),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def is_on(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Whether the kernels are on after a trial."""
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr("parallm.model.kernels.cuda.has_kernels", lambda: True)
        monkeypatch.setattr(kernel_trial, "SIZE", 32)
        monkeypatch.setattr(kernel_trial, "HALF", mx.float16)
        monkeypatch.setattr(delta_chunks, "max_shared_bytes", lambda: 227 * 1024)
        monkeypatch.setattr(gated_delta, "CPU_CHUNK", delta_chunks.CHUNK)
        for module in KERNELS:
            monkeypatch.setattr(module, "kernel", compiled)

    def tried() -> bool:
        kernel_trial.try_kernels.__wrapped__()
        return recurrent.has_kernels()

    yield tried
    recurrent._use.is_off = False


def test_kernels_that_agree_with_the_operations_stay_on(
    is_on: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert is_on()
    assert not caplog.records
    with recurrent.without_kernels():
        assert not recurrent.has_kernels()


@pytest.mark.skipif(on_cuda(), reason="changes the source that a CPU compiles")
@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("delta_outputs", "x *= gate, y *= gate", "", "whole chunks differ"),
        ("conv_step", "tokens[i + 1]", "tokens[i]", "steps differ"),
        pytest.param(
            *("delta_inputs_gradient", "strength * (1.0f - strength)", "strength", "layers differ"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("gated_delta_step", "+ written * key", "- written * key", "steps differ"), marks=pytest.mark.slow
        ),
    ],
)
def test_kernels_that_differ_are_turned_off_with_a_warning(
    name: str,
    old: str,
    new: str,
    said: str,
    is_on: Callable[[], bool],
    compiled: CpuKernels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled.mutation = name, old, new
    assert not is_on()
    assert said in caplog.text


def test_kernels_that_fail_are_turned_off_with_a_warning(
    is_on: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(chunk_scan, "kernel", fail)
    assert not is_on()
    assert "chunks: no such instruction" in caplog.text


@pytest.fixture
def has_experts(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Whether the kernel of experts' products is on after a trial."""
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr("parallm.model.kernels.cuda.has_kernels", lambda: True)
        monkeypatch.setattr(grouped_gemm, "architecture", lambda: "sm_90")
        monkeypatch.setattr(grouped_gemm, "kernel", compiled)

    def tried() -> bool:
        kernel_trial.try_grouped_gemm.__wrapped__(mx.float16)
        return grouped_gemm.has_kernel()

    yield tried
    grouped_gemm._use.is_off = False


def test_the_kernel_of_experts_stays_on_if_it_agrees(
    has_experts: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert has_experts()
    assert not caplog.records


@pytest.mark.skipif(on_cuda(), reason="changes the source that a CPU compiles")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("grouped_gemm", "(n * 2 + lane / 16) ^ lane % 8", "(n * 2 + lane / 16)"),  # of the gradient
        ("grouped_gemm", "factors += expert", "factors += 0 * expert"),  # of the sum
        ("grouped_gemm_tiles", "starts[low] + (tile", "starts[low] / 8 * 8 + (tile"),
    ],
)
def test_a_kernel_of_experts_that_differs_is_turned_off_with_a_warning(
    name: str,
    old: str,
    new: str,
    has_experts: Callable[[], bool],
    compiled: CpuKernels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled.mutation = name, old, new
    assert not has_experts()
    assert "mixtures take longer: results differ" in caplog.text


def test_a_kernel_of_experts_that_fails_is_turned_off_with_a_warning(
    has_experts: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(grouped_gemm, "kernel", fail)
    assert not has_experts()
    assert "mixtures take longer: no such instruction" in caplog.text


@pytest.fixture
def has_warpgroups(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Whether attention by warpgroups is on after a trial."""
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr(flash_attention, "has_kernels", lambda: True)
        monkeypatch.setattr(flash_attention, "architecture", lambda: "sm_90")
        monkeypatch.setattr(flash_attention, "kernel", compiled)

    def tried() -> bool:
        kernel_trial.try_flash_attention.__wrapped__(mx.float16, 2, 64)
        return flash_attention.forward_kernel(64) == flash_attention.HOPPER

    yield tried
    flash_attention._use.is_off = False


def test_attention_by_warpgroups_stays_on_if_it_agrees(
    has_warpgroups: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert has_warpgroups() or architecture() != "sm_90"
    assert not caplog.records


@pytest.mark.skipif(on_cuda(), reason="changes the source that a CPU compiles")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tile.prefix_start + at / PAGE", "tile.prefix_start"),  # of pages
        # of packed sequences
        pytest.param("? tile.prefix_start : tile.start", "? 1 : tile.start", marks=pytest.mark.slow),
    ],
)
def test_attention_by_warpgroups_that_differs_is_turned_off_with_a_warning(
    old: str, new: str, has_warpgroups: Callable[[], bool], compiled: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    compiled.mutation = flash_attention.HOPPER, old, new
    assert not has_warpgroups()
    assert "prompts take longer: results differ" in caplog.text
