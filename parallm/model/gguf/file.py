"""The header of a GGUF file: its metadata, and where its tensors lie. Imports no MLX.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Whatever a file claims is compared with its size
before anything is made of it, so that no damaged file costs more memory than it has bytes.
"""

import struct
from codecs import getincrementaldecoder
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallm.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_HEADER_BYTES = 1 << 28
"""Bytes of metadata and descriptions; those of a model with a million tokens are a tenth of it."""
PIECE = 1 << 16
"""Bytes of a text that are decoded at once."""
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Types of metadata by their number, as numpy calls them."""

Value = str | bool | int | float | list[str] | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensors: blocks of `elements` numbers take `nbytes` bytes each."""

    name: str
    elements: int
    nbytes: int


KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17),
}
"""Types that are read, by their number."""
OTHER_KINDS: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    **dict(enumerate(["IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"], 16)),
    **dict(enumerate(["I8", "I16", "I32", "I64", "F64", "IQ1_M"], 24)),
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not read, for errors."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file; its numbers are not read yet."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    """Rows first, as numpy has it; the file stores it the other way round."""
    data: NDArray[np.uint8]
    """Its bytes, mapped from the file."""

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The bytes of each row."""
        return self.data.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header is whole."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata. Raises ModelError if it is none, or is not there and has no default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {_shown(value)}, and should be a text")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of the metadata. Raises ModelError as `text` does, and for one below `least`."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {_shown(value)}, and should be an integer from {least} on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number of the metadata. Raises ModelError as `text` does."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{key} is {_shown(value)}, and should be a positive number")
        return float(value)

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")


def is_gguf(path: Path) -> bool:
    """Whether a path names a file of this format: by its name, or by its first bytes, as blobs have no such name."""
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Map a file and read its header. Raises ModelError, which names what is wrong."""
    try:
        content = np.memmap(path, mode="r", dtype=np.uint8) if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    try:
        return _Header(content).read(path)
    except _Damaged as error:
        raise ModelError(f"{path}: {error}") from error


class _Damaged(ValueError):
    """What a header says cannot be."""


class _Header:
    """Reads a header from its first byte on."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content
        self._view = content.data
        self._at = 0

    def read(self, path: Path) -> GgufFile:
        num_tensors, num_values = self._counts()
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._string("a key")
            if key in metadata:
                raise _Damaged(f"the key {key[:100]!r} is there twice; the file is damaged")
            metadata[key] = self._value(key)
        described: dict[str, tuple[tuple[int, ...], Kind, int]] = {}
        for _ in range(num_tensors):
            name, shape, kind, offset = self._description()
            if name in described:
                raise _Damaged(f"the tensor {name!r} is there twice; the file is damaged")
            described[name] = shape, kind, offset
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {_shown(alignment)}, and should be a power of two from 8 on")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (shape, kind, offset) in described.items():
            tensors[name] = self._tensor(name, shape, kind, offset, start, alignment)
        _check_overlap(sorted((form[2], tensors[name].data.size, name) for name, form in described.items()))
        return GgufFile(path=path, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))

    def _counts(self) -> tuple[int, int]:
        """Numbers of tensors and of values of the metadata."""
        if bytes(self._content[:4]) != MAGIC:
            raise _Damaged("it does not begin as a GGUF file does")
        self._at = 4
        version = self._number("<u4", "the version")
        if version in (1 << 24, 2 << 24, 3 << 24):
            raise _Damaged("its numbers are big-endian; convert it to little-endian first (gguf-convert-endian)")
        if version not in VERSIONS:
            raise _Damaged(f"it is GGUF of version {version}, and versions 2 and 3 are known here; convert it anew")
        num_tensors, num_values = self._number("<u8", "a count"), self._number("<u8", "a count")
        # the least that a tensor or a value takes in the header
        if num_tensors * 32 + num_values * 13 > self._content.size:
            raise _Damaged(f"it claims {num_tensors:,} tensors and {num_values:,} keys, more than it has room for")
        return num_tensors, num_values

    def _take(self, nbytes: int, what: str) -> int:
        """The place where the next `nbytes` bytes begin."""
        start = self._at
        if nbytes > self._content.size - start:
            raise _Damaged(f"it ends within {what}; copy or download it again")
        if start + nbytes > MAX_HEADER_BYTES:
            raise _Damaged(f"its metadata goes on beyond {MAX_HEADER_BYTES:,} bytes, which no model needs")
        self._at = start + nbytes
        return start

    def _number(self, kind: str, what: str) -> Any:
        start = self._take(int(kind[2]), what)
        return struct.unpack_from(_FORMATS[kind], self._view, start)[0]

    def _string(self, what: str) -> str:
        length = self._number("<u8", what)
        start = self._take(length, what)
        end = start + length
        try:
            if length <= PIECE:
                return str(self._view[start:end], "utf-8")
            decode = getincrementaldecoder("utf-8")().decode  # so that a wrong length does not decode half of the file
            pieces = [decode(self._view[at : min(at + PIECE, end)]) for at in range(start, end, PIECE)]
            return "".join([*pieces, decode(b"", final=True)])
        except UnicodeDecodeError as error:
            raise _Damaged(f"{what} is no UTF-8; the file is damaged") from error

    def _value(self, key: str) -> Value:
        kind = self._number("<u4", key[:100])
        if kind == STRING:
            return self._string(key[:100])
        if kind == ARRAY:
            return self._array(key[:100])
        if kind not in SCALARS:
            raise _Damaged(f"{key[:100]!r} is a value of the unknown type {kind}")
        if kind == BOOL:
            return bool(self._array_of("|u1", 1, key)[0])
        number = self._number(SCALARS[kind], key[:100])
        return float(str(np.float32(number))) if SCALARS[kind] == "<f4" else number  # 1e-06 and not 9.999999974e-07

    def _array(self, key: str) -> list[str] | NDArray[Any]:
        kind, length = self._number("<u4", key), self._number("<u8", key)
        if kind == STRING:
            self._check_room(length, 8, key)
            return [self._string(key) for _ in range(length)]
        if kind not in SCALARS:
            raise _Damaged(f"{key!r} is an array of the unknown type {kind}")
        return self._array_of(SCALARS[kind], length, key)

    def _array_of(self, kind: str, length: int, key: str) -> NDArray[Any]:
        size = int(kind[2])
        self._check_room(length, size, key)
        start = self._take(length * size, key)
        return self._content[start : start + length * size].view("|u1" if kind == "|b1" else kind)

    def _check_room(self, length: int, size: int, key: str) -> None:
        if length * size > self._content.size - self._at:
            raise _Damaged(f"{key!r} claims {length:,} entries, more than the file has room for")

    def _description(self) -> tuple[str, tuple[int, ...], Kind, int]:
        name = self._string("the name of a tensor")[:200]
        num_dimensions = self._number("<u4", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise _Damaged(f"the tensor {name!r} has {num_dimensions} dimensions, and 1 to {MAX_DIMENSIONS} are known")
        shape = tuple(self._number("<u8", name) for _ in range(num_dimensions))[::-1]
        number = self._number("<u4", name)
        if number not in KINDS:
            known = ", ".join(kind.name for kind in KINDS.values())
            raise _Damaged(
                f"the tensor {name!r} is of the type {OTHER_KINDS.get(number, number)}, which is not read here; "
                f"choose a file of the types {known}"
            )
        return name, shape, KINDS[number], self._number("<u8", name)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: Kind, offset: int, start: int, alignment: int) -> Tensor:
        size = 1
        for length in shape:
            size *= length
        if size == 0 or shape[-1] % kind.elements:
            raise _Damaged(f"the tensor {name!r} has the shape {shape}, which blocks of {kind.elements} cannot have")
        nbytes = size // kind.elements * kind.nbytes
        if offset % alignment or start + offset + nbytes > self._content.size:
            raise _Damaged(
                f"the tensor {name!r} lies at {offset:,} with {nbytes:,} bytes, outside of the file; copy or download "
                "it again"
            )
        begin = start + offset
        return Tensor(name, kind, shape, self._content[begin : begin + nbytes])


def _check_overlap(places: list[tuple[int, int, str]]) -> None:
    """Raise _Damaged if two of the places (offset, size, name), sorted, share a byte."""
    end, before = 0, ""
    for offset, nbytes, name in places:
        if offset < end:
            raise _Damaged(f"the tensors {before!r} and {name!r} overlap; the file is damaged")
        end, before = offset + nbytes, name


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:100]


_FORMATS = dict(zip(SCALARS.values(), ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "<Q", "<q", "<d"), strict=True))
