"""Files that clients upload to make models of, by their digest, and folders made of them.

A blob is a file below `blobs`, written whole and then renamed; a folder has links to blobs. Every function here blocks
and runs on a thread, but for `store_blob`.
"""

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from parallm.errors import InvalidRequest, NotStored

DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
BLOBS, MODELS, ADAPTERS = "blobs", "models", "adapters"
"""Folders below that of the catalogue."""
PIECE = 1 << 20
"""Bytes that are written and counted at a time."""
SECONDS_TO_CREATE = 3600.0
"""Time after its upload in which a blob stays, although no model has it yet."""


def blob_path(folder: Path, digest: str) -> Path:
    """Return where the blob of a digest lies, or would lie. Raises InvalidRequest for what is no digest."""
    match = DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidRequest(
            f"invalid digest format: {digest[:100]!r}; it is sha256: and 64 hexadecimal digits", "digest"
        )
    return folder / BLOBS / f"sha256-{match[1]}"


async def store_blob(path: Path, chunks: AsyncIterator[bytes]) -> None:
    """Write a blob. Raises InvalidRequest unless it has the digest of its name, NotStored."""
    digest, piece = hashlib.sha256(), bytearray()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".blob-", dir=path.parent)
    except OSError as error:
        raise NotStored(f"the blob cannot be written: {error}; nothing is") from error

    def write(file: BinaryIO, content: bytes) -> None:
        digest.update(content)
        file.write(content)
        file.flush()  # a disk that is nearly full takes a part, and refuses the rest here

    try:
        with os.fdopen(number, "wb") as file:
            async for chunk in chunks:
                piece += chunk
                if len(piece) >= PIECE:
                    await asyncio.to_thread(write, file, bytes(piece))
                    piece.clear()
            await asyncio.to_thread(write, file, bytes(piece))
        if f"sha256-{digest.hexdigest()}" != path.name:
            raise InvalidRequest(f"digest mismatch: the content is sha256:{digest.hexdigest()}", "digest")
        Path(name).replace(path)
    except OSError as error:
        raise NotStored(f"the blob cannot be written: {error}; nothing is") from error
    finally:
        Path(name).unlink(missing_ok=True)


def link_blobs(folder: Path, kind: str, files: Mapping[str, str]) -> Path:
    """Return a new folder below `kind` with the blobs of these names. Raises InvalidRequest, NotStored."""
    links = {_checked(name): blob_path(folder, digest) for name, digest in files.items()}
    for name, path in links.items():
        if not path.is_file():
            raise InvalidRequest(f"{name}: no blob {files[name]} was uploaded; POST it to /api/blobs first", "files")
    made = folder / kind / uuid.uuid4().hex
    hidden = made.with_name(f".{made.name}")  # until it is whole
    try:
        for name, path in links.items():
            (hidden / name).parent.mkdir(parents=True, exist_ok=True)
            (hidden / name).hardlink_to(path)
        hidden.rename(made)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise NotStored(f"the model's folder cannot be written: {error}; nothing is") from error
    return made


def link_model(folder: Path, model: Path) -> Path:
    """Return a new folder with links to the files of a model on this disk, or to its one file. Raises NotStored."""
    made = folder / MODELS / uuid.uuid4().hex
    hidden = made.with_name(f".{made.name}")
    try:
        hidden.mkdir(parents=True)
        for path in [model] if model.is_file() else model.iterdir():
            (hidden / path.name).symlink_to(path.resolve())
        hidden.rename(made)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise NotStored(f"the model's folder cannot be written: {error}; nothing is") from error
    return made


def sweep(folder: Path, adapters: Collection[str]) -> None:
    """Remove blobs that no folder has any more, and folders of adapters beside those given."""
    for path in (folder / ADAPTERS).glob("*"):
        if str(path) not in adapters:
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / BLOBS).glob("*"):  # those that an ended process has left half written, too
        found = path.stat()
        if found.st_nlink == 1 and time.time() - found.st_mtime > SECONDS_TO_CREATE:
            path.unlink(missing_ok=True)


def _checked(name: str) -> str:
    """Return a name of a file below a folder. Raises InvalidRequest for one that leads elsewhere."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise InvalidRequest(f"file path must be relative, without .. and backslashes; it is {name[:100]!r}", "files")
    return name
