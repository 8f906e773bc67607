"""Machine code in MLX's own cache on disk, under a short text that stands for it in launches.

MLX copies a custom kernel's code twice at each launch and hashes it: 9 microseconds of the host for 25 KB, 16 for 42,
some 170 times in a step of a 0.5B policy. It loads a module once, though, and first looks on disk, in a file that is
named by the kernel and by the hash of what the launch gave as code (MLX 0.32, `jit_module.cpp`). So launches give a few
bytes, and the code lies there.
"""

import hashlib
import logging
import os
from pathlib import Path
from uuid import uuid4

from parallm.device.user_cache import is_own

FOLDER = "MLX_PTX_CACHE_DIR"
"""The variable that names MLX's folder; without it MLX shares one with all users."""
SEED, MULTIPLIER, BITS_64 = 0xC70F6907, 0xC6A4A7935BD1E995, (1 << 64) - 1

logger = logging.getLogger(__name__)


def put_module(name: str, cubin: bytes) -> bytes | None:
    """The text that stands for this code of the function `name`, which lies in MLX's cache from now on.

    None where that cache is not private to the user, or cannot be written.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    token = f"parallm {hashlib.sha256(cubin).hexdigest()[:24]}".encode()
    module = folder / f"{name}_{standard_hash(token):x}"
    try:
        if not folder.name or not is_own(folder.stat()):
            return None
        _put(module.with_suffix(".txt"), f"{name}\t{name}\n".encode())  # names in the source, and in the code
        _put(module.with_suffix(".ptx"), cubin)
    except OSError as error:
        logger.warning("kernels take longer to launch: %s", error)
        return None
    return token


def _put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, unless it is there."""
    if path.is_file() and is_own(path.stat()) and path.read_bytes() == content:
        return
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def standard_hash(text: bytes) -> int:
    """`std::hash` of a string in GNU's C++ library: MurmurHash64A by Austin Appleby, with the library's own seed."""
    size = len(text)
    value = SEED ^ size * MULTIPLIER & BITS_64
    for begin in range(0, size - 7, 8):
        word = int.from_bytes(text[begin : begin + 8], "little")
        word = _mixed(word * MULTIPLIER & BITS_64) * MULTIPLIER & BITS_64
        value = (value ^ word) * MULTIPLIER & BITS_64
    if rest := text[size - size % 8 :]:
        value = (value ^ int.from_bytes(rest, "little")) * MULTIPLIER & BITS_64
    return _mixed(_mixed(value) * MULTIPLIER & BITS_64)


def _mixed(value: int) -> int:
    return value ^ value >> 47
