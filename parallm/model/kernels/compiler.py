"""Compiles our `.cu` files with NVRTC, NVIDIA's compiler in a library, into cubins: machine code of one architecture.

MLX compiles custom kernels too, but anew in each process and below headers of its own that take 1.5 s of every kernel;
ours take 30 to 300 ms, once (`cubin_cache.py`). Everything else is as MLX does it, so that numbers stay the same: its
options, NVRTC's default arithmetic (multiplications and additions fused, nothing approximated), NVIDIA's headers of
bfloat16 and float16. This module needs neither MLX nor a GPU.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parallm.model.kernels.cubin_cache import Origin, cached_cubin, is_cached

Value = int | bool | str | object
Defines = tuple[tuple[str, Value], ...]
"""Names and values that a kernel is compiled with: macros, or types where the value is a `mlx.core.Dtype`."""
Specialization = tuple[str, Defines]
"""Name of a kernel, and its macros."""

FOLDER = Path(__file__).parent
INCLUDE, LIBRARY = re.compile(r'^#include "(.+)"\n', re.M), re.compile(r"^#include <.+>\n", re.M)
OPTIONS = ("--device-as-default-execution-space",)
VERBOSE = "--ptxas-options=-v"
MAJORS = (13, 12)  # of CUDA
TYPES = {
    "mlx.core.bfloat16": "__nv_bfloat16",
    "mlx.core.float16": "__half",
    "mlx.core.float32": "float",
    "mlx.core.bool": "bool",
    "mlx.core.int8": "int8_t",
    "mlx.core.uint8": "uint8_t",
    "mlx.core.int16": "int16_t",
    "mlx.core.uint16": "uint16_t",
    "mlx.core.int32": "int32_t",
    "mlx.core.uint32": "uint32_t",
    "mlx.core.int64": "int64_t",
    "mlx.core.uint64": "uint64_t",
}


class CompileError(Exception):
    """NVRTC refused a source; the text is its log."""


class NoCompiler(Exception):
    """NVRTC or NVIDIA's headers are not on this machine."""


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """The library and the folder of NVIDIA's headers."""

    library: ctypes.CDLL
    headers: Path

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """The cubin, and the log. Raises CompileError."""
        program = ctypes.c_void_p()
        options = (*options, f"--include-path={self.headers}")
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self.library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        try:
            result = self.library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if result != 0:
                raise CompileError(log or f"NVRTC's error {result}")
            return self._fetch(program, "CUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.library[f"nvrtcGet{what}"](program, buffer)
        return buffer.raw


def cubin(name: str, defines: Defines = (), architecture: str = "sm_90a") -> bytes:
    """The machine code of `{name}.cu` with these macros, from the cache on disk, or else compiled and put there.

    Raises NoCompiler, or CompileError.
    """
    version, *options, source = _origin(name, defines, architecture)
    return cached_cubin((version, *options, source), lambda: nvrtc().compile(source, options)[0])


def is_compiled(name: str, defines: Defines, architecture: str) -> bool:
    """Whether `cubin` finds it on disk."""
    return is_cached(_origin(name, defines, architecture))


def compile_log(name: str, defines: Defines = (), architecture: str = "sm_90a") -> str:
    """What the assembler says about registers, spills and shared memory."""
    _, *options, source = _origin(name, defines, architecture)
    once = f"__device__ int unused_{os.urandom(8).hex()};\n"  # NVRTC says nothing of what it has compiled before
    return nvrtc().compile(source + once, [*options, VERBOSE])[1]


def source_of(name: str, defines: Defines = ()) -> str:
    """The text that is compiled: what every kernel sees, macros, and `{name}.cu` with the headers of this folder."""
    kernel = INCLUDE.sub(lambda match: (FOLDER / match[1]).read_text(), (FOLDER / f"{name}.cu").read_text())
    libraries = LIBRARY.findall(kernel)  # before the macros, of which they know nothing
    lines = [_line(macro, value) for macro, value in defines]
    return "".join([(FOLDER / "prelude.cuh").read_text(), *libraries, *lines, LIBRARY.sub("", kernel)])


@cache
def nvrtc() -> Nvrtc:
    """Raises NoCompiler."""
    places = list(_places())
    for library, headers in places:
        if (headers / "cuda_bf16.h").is_file():
            try:
                return Nvrtc(ctypes.CDLL(str(library)), headers)
            except OSError:
                continue
    raise NoCompiler(f"no NVRTC with cuda_bf16.h in {', '.join(str(headers.parent) for _, headers in places)}")


def _places() -> Iterator[tuple[Path, Path]]:
    """Libraries and headers that may be there: first those that MLX itself takes."""
    spec = importlib.util.find_spec("nvidia")
    for packages in map(Path, spec.submodule_search_locations or () if spec else ()):
        yield packages / "cu13/lib/libnvrtc.so.13", packages / "cu13/include"
        yield packages / "cuda_nvrtc/lib/libnvrtc.so.12", packages / "cuda_runtime/include"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            folders = (Path(home) / "lib64", Path(home) / "lib")
            libraries = [folder / f"libnvrtc.so.{major}" for folder in folders for major in MAJORS]
            yield from ((library, Path(home) / "include") for library in libraries)


def _origin(name: str, defines: Defines, architecture: str) -> Origin:
    return nvrtc().version, f"--gpu-architecture={architecture}", *OPTIONS, source_of(name, defines)


def _line(name: str, value: Value) -> str:
    if str(value) in TYPES:
        return f"using {name} = {TYPES[str(value)]};\n"
    return f"#define {name} {int(value) if isinstance(value, bool) else value}\n"
