"""Code in MLX's cache under the names that MLX looks for."""

import subprocess
from pathlib import Path

import pytest

from parallm.model.kernels.module_cache import put_module, standard_hash
from tests.model.kernels.cuda_on_cpu import needs_compiler

TEXTS = ["", "a", "1234567", "12345678", "123456789", "parallm 0123456789abcdef", "x" * 1000]
PROGRAM = """
#include <cstdio>
#include <functional>
#include <string>
int main(int count, char** texts) {
  for (int i = 1; i < count; i++) printf("%zx\\n", std::hash<std::string>{}(texts[i]));
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_hash_is_that_of_the_library_that_mlx_was_built_with() -> None:
    assert [f"{standard_hash(text):x}" for text in (b"", b"abc", b"12345678")] == [
        "553e93901e462a6e",
        "32d82bf8ed3dba39",
        "8c5b90a33a04dca5",
    ]


@needs_compiler
def test_a_hash_is_that_of_this_machines_library(tmp_path: Path) -> None:
    source, program = tmp_path / "hash.cpp", tmp_path / "hash"
    source.write_text(PROGRAM)
    subprocess.run(["g++", "-o", program, source], check=True)
    said = subprocess.run([program, *TEXTS], capture_output=True, text=True, check=True).stdout
    assert said.split() == [f"{standard_hash(text.encode()):x}" for text in TEXTS]


def test_a_module_lies_under_the_hash_of_its_text(cache: Path) -> None:
    token = put_module("swiglu", b"code")
    assert token is not None
    module = cache / f"swiglu_{standard_hash(token):x}"
    assert module.with_suffix(".ptx").read_bytes() == b"code"
    assert module.with_suffix(".txt").read_text() == "swiglu\tswiglu\n"
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o600] * 2


def test_other_code_has_another_text(cache: Path) -> None:
    assert put_module("swiglu", b"code") != put_module("swiglu", b"other code")
    assert len(list(cache.iterdir())) == 4


def test_code_that_is_not_what_it_was_is_written_anew(cache: Path) -> None:
    put_module("swiglu", b"code")
    (path,) = cache.glob("*.ptx")
    path.write_bytes(b"half of")
    put_module("swiglu", b"code")
    assert path.read_bytes() == b"code"


def test_what_is_there_stays(cache: Path) -> None:
    put_module("swiglu", b"code")
    before = {path: path.stat().st_ino for path in cache.iterdir()}
    put_module("swiglu", b"code")
    assert {path: path.stat().st_ino for path in cache.iterdir()} == before


def test_a_cache_of_others_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.chmod(0o777)
    assert put_module("swiglu", b"code") is None
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    assert put_module("swiglu", b"code") is None


def test_a_cache_that_cannot_be_written_costs_time_alone(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / f"swiglu_{standard_hash(put_module('swiglu', b'code') or b''):x}.ptx").unlink()
    token = put_module("swiglu", b"code")
    assert token is not None
    (cache / f"swiglu_{standard_hash(token):x}.ptx").unlink()
    (cache / f"swiglu_{standard_hash(token):x}.ptx").mkdir()
    assert put_module("swiglu", b"code") is None
    assert "longer to launch" in caplog.text
