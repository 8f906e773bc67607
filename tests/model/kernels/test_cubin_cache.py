"""Cubins on disk, with a compiler that counts: whole, private, and of what they were compiled from."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.model.kernels import cubin_cache
from parallm.model.kernels.cubin_cache import FORMAT, cached_cubin, is_cached

ORIGIN = ("13.0", "--gpu-architecture=sm_90a", "source")
CUBIN = b"\x7fELF machine code"


class Compiler:
    def __init__(self, cubin: bytes = CUBIN) -> None:
        self.cubin, self.calls = cubin, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.cubin


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallm" / "kernels"


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    compiler = Compiler()
    assert not is_cached(ORIGIN)
    assert cached_cubin(ORIGIN, compiler) == cached_cubin(ORIGIN, compiler) == CUBIN
    assert is_cached(ORIGIN)
    assert compiler.calls == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(folder).stat().st_mode) == 0o600


@pytest.mark.parametrize("place", range(len(ORIGIN)))
def test_another_compiler_option_or_source_is_another_kernel(place: int) -> None:
    other = tuple(f"{text}!" if index == place else text for index, text in enumerate(ORIGIN))
    cached_cubin(ORIGIN, Compiler())
    assert not is_cached(other)
    assert cached_cubin(other, Compiler(b"other")) == b"other"
    assert cached_cubin(ORIGIN, Compiler()) == CUBIN


def test_texts_that_are_cut_elsewhere_are_another_kernel() -> None:
    cached_cubin(("a", "bc"), Compiler())
    assert not is_cached(("ab", "c"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[: len(FORMAT)],
        lambda content: b"",
        lambda content: content[:-1] + b"!",
        lambda content: content + b"!",
        lambda content: content.replace(b"cubin 1", b"cubin 0"),
        lambda content: CUBIN,
    ],
    ids=["cut", "head alone", "empty", "changed", "longer", "another format", "foreign"],
)
def test_a_file_that_does_not_fit_its_digest_is_compiled_anew(spoil: Callable[[bytes], bytes], folder: Path) -> None:
    cached_cubin(ORIGIN, Compiler())
    path = the_file(folder)
    content = path.read_bytes()
    path.write_bytes(spoil(content))
    assert not is_cached(ORIGIN)
    compiler = Compiler()
    assert cached_cubin(ORIGIN, compiler) == CUBIN
    assert compiler.calls == 1
    assert path.read_bytes() == content


def test_a_file_that_others_may_write_is_compiled_anew(folder: Path) -> None:
    cached_cubin(ORIGIN, Compiler())
    the_file(folder).chmod(0o666)
    compiler = Compiler(b"ours")
    assert cached_cubin(ORIGIN, compiler) == b"ours"
    assert stat.S_IMODE(the_file(folder).stat().st_mode) == 0o600


def test_a_file_of_somebody_else_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_cubin(ORIGIN, Compiler())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    compiler = Compiler(b"ours")
    assert cached_cubin(ORIGIN, compiler) == b"ours"


def test_a_failed_compilation_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached_cubin(ORIGIN, fail)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert cached_cubin(ORIGIN, Compiler()) == CUBIN
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []


def test_readers_see_whole_files_while_others_write(folder: Path) -> None:
    """With a file that is written in place a reader sees a part of it, and compiles."""
    cubin = os.urandom(1 << 20)
    cached_cubin(ORIGIN, Compiler(cubin))
    path, stop = cubin_cache._path(ORIGIN), threading.Event()
    assert path is not None

    def write() -> None:
        while not stop.is_set():
            cubin_cache._write(path, cubin)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        seen = [cubin_cache._read(path) == cubin for _ in range(50)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(seen)
    assert the_file(folder) == path


def test_without_a_folder_each_call_compiles(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    compiler = Compiler()
    assert cached_cubin(ORIGIN, compiler) == cached_cubin(ORIGIN, compiler) == CUBIN
    assert compiler.calls == 2
    assert not is_cached(ORIGIN)
