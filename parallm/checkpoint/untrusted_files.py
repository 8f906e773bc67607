"""Checks of files that clients bring: paths, zip archives and safetensors. `adapter_store` calls it.

Nothing is executed: pickled files, links out of the folder and anything but an adapter are refused. Pure Python, for
any thread.
"""

import io
import math
import os
import shutil
import stat
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO

from parallm.errors import AdapterError, AdapterMissing
from parallm.model.adapters.configs import CONFIG, json_object, parse_config
from parallm.model.adapters.files import MLX_WEIGHTS, PEFT_WEIGHTS

MEMBERS = (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS)
IGNORED = ("README.md", ".DS_Store")
MACOS_FOLDER = "__MACOSX/"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_TENSORS = 16384
MAX_AXES = 4
MAX_NUMBER = 1 << 48
"""Largest number in a shape or an offset; products of larger ones would be slow."""
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the types that adapters may have."""


def resolve_inside(root: Path, path: str) -> Path:
    """The existing `path`, absolute or below `root`, with links followed.

    Raises AdapterError if it is outside of `root`, AdapterMissing if it does not exist.
    """
    try:
        resolved = (root / path).resolve(strict=True)
    except (OSError, ValueError) as error:
        raise AdapterMissing(f"{path!r} is not there; adapters are loaded from server.adapters_root") from error
    if not resolved.is_relative_to(root.resolve()):
        raise AdapterError(f"{path!r} is outside of server.adapters_root, the only folder that adapters come from")
    return resolved


def check_folder(folder: Path, root: Path, max_bytes: int) -> None:
    """Raise AdapterError unless the adapter in `folder` is safe to read."""
    for name in MEMBERS:
        if (folder / name).exists():
            with _ordinary_file(resolve_inside(root, str(folder / name)), name) as file:
                size = os.fstat(file.fileno()).st_size
                _check_size(name, size, max_bytes)
                try:
                    parse_config(file.read()) if name == CONFIG else check_safetensors(file, size)
                except AdapterError as error:
                    raise AdapterError(f"{folder / name}: {error}") from error


def unpack(archive: bytes, folder: Path, max_bytes: int) -> None:
    """Write the adapter in a zip archive to `folder`. Raises AdapterError, and leaves `folder` unusable then.

    The header of each file is checked before anything is unpacked.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            infos = _members(opened.infolist())
            _check_members(infos, max_bytes)
            for info in infos:
                with opened.open(info) as member:
                    if info.filename == CONFIG:
                        parse_config(member.read())
                    else:
                        check_safetensors(member, info.file_size)
            for info in infos:
                with opened.open(info) as member, (folder / info.filename).open("wb") as file:
                    shutil.copyfileobj(member, file)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise AdapterError(f"the upload is no zip archive that can be read: {error}") from error


def check_safetensors(file: IO[bytes], size: int) -> None:
    """Raise AdapterError unless `file` of `size` bytes is a whole safetensors file of floating-point tensors.

    Reads the header only. Format: https://github.com/huggingface/safetensors
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise AdapterError("the weights are no whole safetensors file; pickled files are never read")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"the header of the weights has {length} bytes, the limit is {MAX_HEADER_BYTES}")
    header = json_object(file.read(length), "the header of the weights")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise AdapterError(f"the weights have {len(header)} tensors, the limit is {MAX_TENSORS}")
    end = 0
    for name, (begin, stop, num_bytes) in sorted(
        ((name, _extent(name, entry)) for name, entry in header.items()), key=lambda pair: pair[1]
    ):
        if begin != end or stop - begin != num_bytes:
            raise AdapterError(f"the tensor {name[:100]!r} is not where the header of the weights says")
        end = stop
    if end != size - 8 - length:
        raise AdapterError("the weights have more or fewer bytes than their header says")


def _ordinary_file(path: Path, name: str) -> BinaryIO:
    """Open `path`. Raises AdapterError for a pipe, a device or a socket, without waiting for it."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            # the path may have changed since, and opening a pipe would wait for a writer
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except OSError as error:
        raise AdapterError(f"{name} cannot be opened: {error.strerror}") from error
    raise AdapterError(f"{name} is no ordinary file")


def _check_size(name: str, size: int, max_bytes: int) -> None:
    limit = MAX_CONFIG_BYTES if name == CONFIG else max_bytes
    if size > limit:
        raise AdapterError(f"{name} has {size} bytes, the limit is {limit}")


def _members(infos: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """The files, named relative to their common folder, without extra files of PEFT and macOS."""
    files = [info for info in infos if not info.is_dir() and not info.filename.startswith(MACOS_FOLDER)]
    folders = {info.filename.rpartition("/")[0] for info in files}
    folder = folders.pop() if len(folders) == 1 else ""
    if folder and ".." not in folder.split("/"):
        for info in files:
            info.filename = info.filename.removeprefix(f"{folder}/")
    return [info for info in files if info.filename not in IGNORED]


def _check_members(infos: list[zipfile.ZipInfo], max_bytes: int) -> None:
    names = [info.filename for info in infos]
    if strange := [name for name in names if name not in MEMBERS]:
        raise AdapterError(
            f"the upload holds {strange[0][:100]!r}; it should hold {CONFIG} and {MLX_WEIGHTS} or {PEFT_WEIGHTS}"
        )
    if len(set(names)) != len(names) or len(names) != 2 or CONFIG not in names:
        raise AdapterError(f"the upload should hold {CONFIG} and one of {MLX_WEIGHTS} and {PEFT_WEIGHTS}, each once")
    for info in infos:
        mode = info.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise AdapterError(f"{info.filename} in the upload is no ordinary file")
        _check_size(info.filename, info.file_size, max_bytes)


def _extent(name: str, entry: Any) -> tuple[int, int, int]:
    """Begin and end of a tensor in the file, and the bytes that its shape needs."""
    try:
        shape, kind = entry["shape"], entry["dtype"]
        begin, stop = entry["data_offsets"]
        numbers = [*shape, begin, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"the tensor {name[:100]!r} has no whole description") from error
    if not isinstance(kind, str) or kind not in BYTES:
        raise AdapterError(f"the tensor {name[:100]!r} is of type {str(kind)[:20]}; adapters have {', '.join(BYTES)}")
    if len(numbers) > MAX_AXES + 2 or not all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers):
        raise AdapterError(f"the tensor {name[:100]!r} has a shape or place that is no number, or too many of them")
    return begin, stop, math.prod(shape) * BYTES[kind]
