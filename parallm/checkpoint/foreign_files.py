"""Files from somebody else: paths that must stay in a folder, archives, and safetensors that must be what they say.

Nothing here executes what it reads: pickled files, symbolic links out of the folder and whatever is no adapter are
refused. Pure Python, for any thread.
"""

import io
import json
import math
import re
import stat
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from parallm.errors import AdapterError, AdapterMissing
from parallm.model.adapter_files import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS

MEMBERS = (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS)
IGNORED = ("README.md", ".DS_Store")
MACOS_FOLDER = "__MACOSX/"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of tensors that adapters have, and their sizes."""


def inside(root: Path, wanted: str) -> Path:
    """The existing path `wanted`, absolute or below `root`, links followed.

    Raises AdapterError if that is outside of `root`, AdapterMissing if there is nothing.
    """
    try:
        found = (root / wanted).resolve(strict=True)
    except (OSError, ValueError) as error:
        raise AdapterMissing(f"{wanted!r} is not there; adapters are loaded from {root}") from error
    if not found.is_relative_to(root.resolve()):
        raise AdapterError(f"{wanted!r} is outside of {root}, the only folder that adapters are loaded from")
    return found


def check_folder(folder: Path, root: Path, max_bytes: int) -> None:
    """Raise AdapterError unless the adapter in `folder` can be read without danger."""
    for name in MEMBERS:
        if (folder / name).exists():
            path = inside(root, str(folder / name))
            size = path.stat().st_size
            limit = MAX_CONFIG_BYTES if name == CONFIG else max_bytes
            if size > limit:
                raise AdapterError(f"{path} has {size} bytes, the limit is {limit}")
            with path.open("rb") as file:
                check_config(file.read()) if name == CONFIG else check_safetensors(file, size)


def unpack(archive: bytes, folder: Path, max_bytes: int) -> None:
    """Write the adapter in a zip archive to `folder`. Raises AdapterError; what is in `folder` is of no use then."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            infos = _members(opened.infolist())
            _check_members(infos, max_bytes)
            for info in infos:
                with opened.open(info) as member:
                    content = member.read(info.file_size + 1)
                if len(content) != info.file_size:
                    raise AdapterError(f"{info.filename} has more bytes than the archive says")
                (folder / info.filename).write_bytes(content)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise AdapterError(f"the upload is no zip archive that can be read: {error}") from error


def check_safetensors(file: BinaryIO, size: int) -> None:
    """Raise AdapterError unless `file` of `size` bytes is a safetensors file of floating-point tensors, whole.

    The format: https://github.com/huggingface/safetensors
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise AdapterError("the weights are no whole safetensors file; pickled files are never read")
    header = _json_object(file.read(length), "the header of the weights")
    header.pop("__metadata__", None)
    end = 0
    for name, (begin, stop, wanted) in sorted(
        ((name, _extent(name, entry)) for name, entry in header.items()), key=lambda pair: pair[1]
    ):
        if begin != end or stop - begin != wanted:
            raise AdapterError(f"the tensor {name[:100]!r} is not where the header of the weights says")
        end = stop
    if end != size - 8 - length:
        raise AdapterError("the weights have more or fewer bytes than their header says")


def check_config(content: bytes) -> None:
    """Raise AdapterError unless this is a JSON object of finite numbers whose patterns are harmless."""
    config = _json_object(content, CONFIG)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_harmless, patterns)):
            raise AdapterError(f"{key} in {CONFIG} should have short keys with at most one of * + {{ in each")


def _members(infos: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """Return the files, named relative to their common folder, without those that PEFT and macOS add."""
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
        limit = MAX_CONFIG_BYTES if info.filename == CONFIG else max_bytes
        if info.file_size > limit:
            raise AdapterError(f"{info.filename} in the upload has {info.file_size} bytes, the limit is {limit}")


def _extent(name: str, entry: Any) -> tuple[int, int, int]:
    """Where a tensor begins and stops, and how many bytes its shape needs."""
    try:
        shape, kind = entry["shape"], entry["dtype"]
        begin, stop = entry["data_offsets"]
        numbers = [*shape, begin, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"the tensor {name[:100]!r} has no whole description") from error
    if kind not in BYTES:
        raise AdapterError(f"the tensor {name[:100]!r} is of type {str(kind)[:20]}; adapters have {', '.join(BYTES)}")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise AdapterError(f"the tensor {name[:100]!r} has a shape or place that is no number")
    return begin, stop, math.prod(shape) * BYTES[kind]


def _json_object(content: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{what} is no JSON object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _is_harmless(pattern: str) -> bool:
    # expressions with repetitions in repetitions take a time that is exponential in the length of a name
    return len(pattern) <= 256 and len(re.findall(r"[*+{]", pattern)) <= 1
