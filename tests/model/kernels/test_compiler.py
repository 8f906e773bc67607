"""What is compiled; and, where NVRTC is on the machine, that it compiles. No GPU is needed."""

import re

import mlx.core as mx
import pytest

from parallm.model.kernels.compiler import FOLDER, NoCompiler, nvrtc, source_of

NAMES = sorted(path.stem for path in FOLDER.glob("*.cu"))


def has_nvrtc() -> bool:
    try:
        nvrtc()
    except NoCompiler:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC, such as CUDA_HOME gives")


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_one_function_of_the_name_of_its_file(name: str) -> None:
    assert re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.+?\)\s+)?(\w+)\(', source_of(name)) == [
        name
    ]
    assert source_of(name).isascii()


@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_reads_headers_that_take_long_to_compile(name: str) -> None:
    """Neither MLX's, nor cooperative groups, nor CUDA's standard library: each takes more than a second."""
    quick = {"cuda_bf16.h", "cuda_fp16.h"}
    assert set(re.findall(r"#include\s*[<\"](.+)[>\"]", source_of(name))) == quick


def test_every_header_is_used() -> None:
    included = {header for path in FOLDER.glob("*.cu") for header in re.findall(r'#include "(.*)"', path.read_text())}
    assert included | {"prelude.cuh"} == {path.name for path in FOLDER.glob("*.cuh")}


def test_constants_come_before_the_kernel_and_after_the_headers_of_libraries() -> None:
    defines = (("HALVES", True), ("T", mx.bfloat16), ("D", 64), ("WIDTHS", "1, 2"))
    lines = ["#define HALVES 1", "using T = __nv_bfloat16;", "#define D 64", "#define WIDTHS 1, 2"]
    source = source_of("swiglu", defines)
    assert "\n".join(lines) in source
    assert source.index("#include <cuda_bf16.h>") < source.index(lines[0]) < source.index("struct alignas(16) Pack")


@pytest.mark.parametrize("name", NAMES)
def test_every_condition_of_a_kernel_is_a_macro_that_its_face_defines(name: str) -> None:
    conditions = set(re.findall(r"^#if (\w+)$", (FOLDER / f"{name}.cu").read_text(), re.M))
    faces = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert {condition for condition in conditions if f'("{condition}", ' not in faces} == set()
