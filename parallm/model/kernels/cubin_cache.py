"""Cubins on disk: one file each, in a folder that is private to the user, named by what it was compiled from.

A file is written under another name and then renamed, so that it is there whole or not at all, whatever other processes
do. Each begins with a digest of the rest: what does not fit its digest, or is another user's, is compiled anew.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from parallm.device.user_cache import is_own, user_cache

FORMAT = b"parallm cubin 1\n"
DIGEST_BYTES = 32

Origin = tuple[str, ...]
"""What a cubin was made from: version of the compiler, options, source."""

logger = logging.getLogger(__name__)


def cached_cubin(origin: Origin, compile_it: Callable[[], bytes]) -> bytes:
    """The cubin of this origin; `compile_it` makes what is not on disk."""
    path = _path(origin)
    cubin = None if path is None else _read(path)
    if cubin is None:
        cubin = compile_it()
        if path is not None:
            _write(path, cubin)
    return cubin


def is_cached(origin: Origin) -> bool:
    """Whether `cached_cubin` finds a whole file."""
    path = _path(origin)
    return path is not None and _read(path) is not None


def _path(origin: Origin) -> Path | None:
    folder = user_cache("kernels")
    return None if folder is None else folder / f"{hashlib.sha256(repr(origin).encode()).hexdigest()}.cubin"


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            content, is_ours = file.read(), is_own(os.fstat(file.fileno()))
    except OSError:
        return None
    head = len(FORMAT) + DIGEST_BYTES
    cubin = content[head:]
    return cubin if is_ours and content[:head] == FORMAT + hashlib.sha256(cubin).digest() else None


def _write(path: Path, cubin: bytes) -> None:
    """A full disk costs later processes their time and stops nobody."""
    unfinished = path.with_name(f"{path.stem}.{uuid4().hex}")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(FORMAT + hashlib.sha256(cubin).digest() + cubin)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        logger.warning("cannot keep a kernel in %s: %s", path.parent, error)
