"""The loader of `.cu` files, without a GPU: what MLX's CUDA build would compile; and arrays that are made once."""

import re
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from parallm.model.kernels.cuda import FOLDER, interned_array, kernel

Sources = list[SimpleNamespace]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Sources:
    """The sources that MLX got."""
    sources: Sources = []

    def note(name: str, inputs: list[str], outputs: list[str], source: str, header: str, **options: Any) -> Any:
        sources.append(SimpleNamespace(name=name, source=source, header=header, **options))
        return list

    monkeypatch.setattr(mx.fast, "cuda_kernel", note, raising=False)
    return sources


def load(name: str, **options: Any) -> Any:
    return kernel.__wrapped__(name, ("x",), ("y",), **options)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.cu")))
def test_headers_are_put_before_the_function(name: str, compiled: Sources) -> None:
    load(name)
    text = (FOLDER / f"{name}.cu").read_text()
    headers = re.findall(r'#include "(.*)"', text)
    assert compiled[0].name == name
    assert compiled[0].header == "".join((FOLDER / header).read_text() for header in headers)
    assert "#include" not in compiled[0].source
    assert text.isascii()


def test_every_header_is_used() -> None:
    included = {header for path in FOLDER.glob("*.cu") for header in re.findall(r'#include "(.*)"', path.read_text())}
    assert included == {path.name for path in FOLDER.glob("*.cuh")}


def test_macros_come_before_the_headers_and_tell_kernels_apart(compiled: Sources) -> None:
    load("swiglu", defines=(("HALVES", True),))
    load("swiglu", defines=(("HALVES", False),))
    halves, other = compiled
    assert halves.header.startswith("#define HALVES 1\n")
    assert other.header.startswith("#define HALVES 0\n")
    assert len({halves.name, other.name, "swiglu"}) == 3


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.cu")))
def test_every_condition_of_a_kernel_is_a_macro_that_its_face_defines(name: str) -> None:
    conditions = set(re.findall(r"^#if (\w+)$", (FOLDER / f"{name}.cu").read_text(), re.M))
    faces = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert {condition for condition in conditions if f'("{condition}", ' not in faces} == set()


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
