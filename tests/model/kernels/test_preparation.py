"""Kernels are compiled side by side before they are needed, and people are told; with a compiler that only counts."""

import os
import threading

import pytest

from parallm.model.kernels import preparation
from parallm.model.kernels.compiler import CompileError, Defines, Specialization
from parallm.model.kernels.preparation import prepare_kernels

Reports = list[tuple[int, int]]
KERNELS: list[Specialization] = [("expand", (("TILE", tile),)) for tile in range(12)]


class Compiler:
    """Keeps what it compiles, as the cache on disk does."""

    def __init__(self, *kept: Specialization) -> None:
        self.kept, self.calls = set(kept), 0
        self._lock = threading.Lock()

    def is_compiled(self, name: str, defines: Defines, architecture: str) -> bool:
        assert architecture == "sm_90a"
        return (name, defines) in self.kept

    def cubin(self, name: str, defines: Defines, architecture: str) -> bytes:
        if name == "broken":
            raise CompileError("identifier is undefined")
        with self._lock:
            self.calls += 1
            self.kept.add((name, defines))
        return b"code"


def with_compiler(monkeypatch: pytest.MonkeyPatch, *kept: Specialization) -> Compiler:
    compiler = Compiler(*kept)
    monkeypatch.setattr(preparation, "cubin", compiler.cubin)
    monkeypatch.setattr(preparation, "is_compiled", compiler.is_compiled)
    return compiler


def prepare(kernels: list[Specialization]) -> tuple[int, Reports]:
    reports: Reports = []
    return prepare_kernels(kernels, "sm_90a", lambda done, total: reports.append((done, total))), reports


def test_what_is_missing_is_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = with_compiler(monkeypatch, *KERNELS[:3])
    count, reports = prepare(KERNELS + KERNELS)
    assert count == compiler.calls == 9
    assert compiler.kept == set(KERNELS)
    assert reports[-1] == (12, 12)


def test_a_report_comes_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, *KERNELS[:3])
    _, reports = prepare(KERNELS)
    assert reports == [(4, 12), (12, 12)]
    with_compiler(monkeypatch)
    monkeypatch.setattr(preparation, "SECONDS_BETWEEN", 0)
    assert prepare(KERNELS)[1] == [(done, 12) for done in range(1, 13)]


def test_nothing_is_said_when_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = with_compiler(monkeypatch, *KERNELS)
    assert prepare(KERNELS) == (0, [])
    assert prepare([]) == (0, [])
    assert compiler.calls == 0


def test_a_kernel_that_does_not_compile_is_left_to_who_launches_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = with_compiler(monkeypatch)
    count, reports = prepare([("broken", ()), *KERNELS[:2]])
    assert (count, compiler.calls) == (3, 2)
    assert reports[-1] == (3, 3)
    assert "kernel broken cannot be compiled: identifier is undefined" in caplog.text


def test_threads_compile_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers that wait for each other end only if as many run at once."""
    with_compiler(monkeypatch)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    barrier = threading.Barrier(4, timeout=20)
    monkeypatch.setattr(preparation, "cubin", lambda *_: barrier.wait())
    prepare(KERNELS)
    assert not barrier.broken
