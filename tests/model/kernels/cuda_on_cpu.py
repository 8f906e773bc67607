"""Runs the source of kernels on a CPU, compiled as C++ below `cuda_on_cpu.h`; two dimensions of blocks."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels.compiler import FOLDER, Defines, source_of
from parallm.model.kernels.cuda_graph import BEGINS_EARLY
from tests.model.kernels.test_launches import parameters

HEADER = Path(__file__).with_suffix(".h")
OBJECT = "cuda_on_cpu.o"
WARPGROUPS = HEADER.with_name("warpgroups_on_cpu.h")
ASSEMBLER = ("prelude.cuh", "dependent.cuh", "mma.cuh", "matrices.cuh", "tf32.cuh", "wgmma.cuh", "peer_words.cuh")
"""What the header has of its own."""
SUBSTITUTES = {
    r"extern __shared__ __align__\(\d+\) ([\w ]+) (\w+)\[\];": r"auto* \2 = reinterpret_cast<\1*>(shared_memory);",
    r'asm volatile\("cp.async.commit_group;".*?\);': "commit_copies();",
    r'asm volatile\("cp.async.wait_group %0;" ::"n"\((.*?)\) : "memory"\);': r"wait_copies<\1>();",
    r'asm volatile\("cp.async.wait_group 0;".*?\);': "wait_copies<0>();",
}
COMPILER = ("g++", "-std=c++17", "-Og", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
"""Ubuntu's g++ defines it, and its jumps end a program that leaves a fiber."""
ALIGNMENT = 256
_common_lock = Lock()
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


_compiled: dict[str, Path] = {}
"""The library of each source that this process has compiled."""


class NeverEnds(Exception):
    """A kernel waits for a word that no rank sends."""


class CpuKernels:
    """Stands in for `cuda.kernel`. Kernels write into inputs too, as on a GPU."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.seed = seed
        self.begins_early = False
        """Whether kernels hear that they may begin before the one in front has ended, as in a graph."""
        self.mutation = "", "", ""
        """A kernel, a text of its source, and what stands there instead."""
        self._folder = folder
        self._libraries: dict[tuple[object, ...], ctypes.CDLL] = {}

    def __call__(self, name: str, defines: Defines = (), *, shared_memory: int = 0) -> Any:
        key = name, defines, self.mutation if name == self.mutation[0] else ""
        if key not in self._libraries:
            self._libraries[key] = self._compile(name, defines)
        function = self._libraries[key].launch_kernel
        function.restype = ctypes.c_bool

        def run(inputs: Sequence[mx.array], scalars: Sequence[Any] = (), **launch: Any) -> list[mx.array]:
            originals = [np.asarray(array.view(_stored(array.dtype))) for array in inputs]
            arrays = [_aligned(array) for array in originals]
            types = [np.dtype(str(_stored(dtype)).removeprefix("mlx.core.")) for dtype in launch["output_dtypes"]]
            outputs = [
                _aligned(_unwritten(shape, dtype)) for shape, dtype in zip(launch["output_shapes"], types, strict=True)
            ]
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, *outputs)]
            if self.begins_early and BEGINS_EARLY in source_of(name):
                scalars = [*scalars[:-1], True]
            numbers = [ctypes.c_float(one) if isinstance(one, float) else ctypes.c_int(one) for one in scalars]
            threads = launch["threadgroup"][0]
            blocks = launch["grid"][0] // threads, launch["grid"][1]
            if not function(*blocks, threads, shared_memory, self.seed, *pointers, *numbers):
                raise NeverEnds(name)
            for original, array in zip(originals, arrays, strict=True):
                original[...] = array
            pairs = zip(outputs, launch["output_dtypes"], strict=True)
            return [mx.array(output).view(dtype) for output, dtype in pairs]

        return run

    def _compile(self, name: str, defines: Defines) -> ctypes.CDLL:
        mutant, old, new = self.mutation
        source = source_of(name, defines)
        headers = [f'#include "{HEADER.name}"']
        if (FOLDER / "wgmma.cuh").read_text() in source:
            headers.append(f'#include "{WARPGROUPS}"')
        for header in ASSEMBLER:
            source = source.replace((FOLDER / header).read_text(), "")
        if name == mutant:
            assert old in source, "a line that is there no longer"
            source = source.replace(old, new)
        for pattern, replacement in SUBSTITUTES.items():
            source = re.sub(pattern, replacement, source)
        wanted = parameters(name, defines)
        declared = ", ".join(f"{kind} {parameter}" for kind, parameter in wanted)
        members = "".join(f"{kind} {parameter};\n" for kind, parameter in wanted)
        given, kept = (", ".join(start + parameter for _, parameter in wanted) for start in ("", "arguments."))
        content = (
            "\n".join(headers) + f"\n#define INFINITY HUGE_VALF\n{source}\n"
            f"struct Arguments {{\n{members}}} arguments;\n"
            'extern "C" bool launch_kernel(int blocks, int rows_of_blocks, int threads, unsigned shared, int seed, '
            f"{declared}) {{\n"
            f"  arguments = {{{given}}};\n"
            f"  return launch(blocks, rows_of_blocks, threads, shared, seed, [] {{ {name}({kept}); }});\n}}\n"
        )
        path = self._folder / f"{name}_{len(self._libraries)}.cpp"
        library = path.with_suffix(".so")
        if content in _compiled:
            shutil.copy(_compiled[content], library)  # each copy has variables of its own once it is loaded
        else:
            path.write_text(content)
            common = Path(_compiled_common().name)
            _run("-shared", "-I", common, "-o", library, path, common / OBJECT)
            _compiled[content] = library
        return ctypes.CDLL(str(library))


def _compiled_common() -> TemporaryDirectory[str]:
    """A folder with what all kernels have in common, compiled, which takes g++ a second. It goes with the process."""
    with _common_lock:  # ranks are threads that begin at once
        return _compile_common()


@cache
def _compile_common() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    header = Path(folder.name) / f"{HEADER.name}.gch"
    _run("-x", "c++-header", "-o", header, HEADER)
    _run("-c", "-o", header.with_name(OBJECT), HEADER.with_suffix(".cpp"))
    return folder


def _run(*arguments: str | Path) -> None:
    compiled = subprocess.run([*COMPILER, *arguments], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[:2000]


def _stored(dtype: mx.Dtype) -> mx.Dtype:
    """The type of NumPy with the bits of one of MLX."""
    return mx.uint16 if dtype == mx.bfloat16 else dtype


def _unwritten(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return np.full(shape, {"f": np.nan, "i": -(2**30)}.get(dtype.kind, np.iinfo(np.uint16).max), dtype)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins where vectors may, as a GPU's arrays do and MLX's on a CPU do not."""
    whole = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    copied = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied
