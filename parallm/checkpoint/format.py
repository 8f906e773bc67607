"""One checkpoint as a folder of files: written, synced, and verified against its manifest when read.

`manager` calls it, and handles temporary folders, other checkpoints and fallbacks.
"""

import errno
import hashlib
import json
import logging
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallm.checkpoint.state import Fingerprint, RunFacts, TrainingState
from parallm.errors import AdapterError, CheckpointError
from parallm.model.adapters.files import read_adapter, read_arrays, write_arrays, write_exactly

logger = logging.getLogger(__name__)

ADAPTER = "adapter"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Errors of reading a damaged file; Python's json gives up on deep nesting with RecursionError."""


def write_checkpoint(state: TrainingState, folder: Path) -> None:
    """Write `state` into the empty `folder`, and wait until the disk has it.

    Raises OSError if the disk refuses, TypeError, ValueError or RuntimeError for values that cannot be written.
    """
    fingerprint = state.fingerprint
    write_exactly(
        state.adapter,
        folder / ADAPTER,
        num_layers=fingerprint.num_layers,
        base_name=fingerprint.model,
        base_sha256=fingerprint.model_sha256,
    )
    write_arrays(folder / OPTIMIZER, state.optimizer, {"format": "mlx"})
    (folder / STATE).write_text(_state_text(state))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): _entry(path) for path in files}
    # no line end: without its last byte it must not be a manifest
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=2))
    for path in (*files, folder / MANIFEST, folder / ADAPTER, folder):
        sync(path)


def read_checkpoint(folder: Path) -> TrainingState:
    """Verify sizes and checksums of all files, then read them. Raises CheckpointError for the first fault."""
    try:
        _verify(folder)
        values = json.loads((folder / STATE).read_text())
        saved = values["fingerprint"]
        return TrainingState(
            step=values["step"],
            version=values["version"],
            adapter=read_adapter(folder / ADAPTER),
            optimizer=read_arrays(folder / OPTIMIZER)[0],
            counters=values["counters"],
            score=values["score"],
            fingerprint=Fingerprint(**(saved | {"targets": tuple(saved["targets"])})),
            facts=RunFacts(**values["facts"]) if values.get("facts") is not None else None,
        )
    except (AdapterError, *DAMAGE, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def read_score(folder: Path) -> float | None:
    """The evaluation score of a checkpoint, unverified; None if there is none or it is damaged."""
    score = _state_value(folder, "score")
    return score if isinstance(score, float) and math.isfinite(score) else None


def read_version(folder: Path) -> int | None:
    """The adapter version of a checkpoint, unverified; None if it is damaged."""
    version = _state_value(folder, "version")
    return version if isinstance(version, int) else None


def needed_bytes(state: TrainingState) -> int:
    """Estimated bytes that `write_checkpoint` needs."""
    arrays = [*state.adapter.arrays.values(), *state.optimizer.values()]
    # 256 bytes of header per array, and room for the small files
    return sum(array.nbytes + 256 for array in arrays) + 65536


def write_atomically(file: Path, text: str) -> None:
    """Replace `file`: it always holds the old text or the new one. Raises OSError, changing nothing.

    If the disk does not confirm the rename, a warning says so: a power failure could bring the old text back.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    try:
        sync(file.parent)
    except OSError as error:
        logger.warning("%s could not be synced to the disk: %s", file.parent, error)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _state_value(folder: Path, key: str) -> object:
    """None if the state is damaged or no ordinary file (reading a pipe would block)."""
    path = folder / STATE
    try:
        return json.loads(path.read_text())[key] if path.is_file() else None
    except DAMAGE:
        return None


def _state_text(state: TrainingState) -> str:
    values = {
        "format": FORMAT,
        "step": state.step,
        "version": state.version,
        "schedule_step": state.step,
        "score": None if state.score is None else float(state.score),
        "fingerprint": asdict(state.fingerprint),
        "facts": None if state.facts is None else asdict(state.facts),
        "counters": dict(state.counters),
    }
    text = json.dumps(values, indent=2) + "\n"
    if not _is_same(json.loads(text)["counters"], values["counters"]):
        raise ValueError("TrainingState.counters would not come back equal from JSON: it holds tuples or odd keys")
    return text


def _is_same(read: Any, written: Any) -> bool:
    """Whether both hold the same values, with NaN equal to NaN."""
    if isinstance(read, dict) and isinstance(written, dict):
        return read.keys() == written.keys() and all(_is_same(read[key], written[key]) for key in read)
    if isinstance(read, list) and isinstance(written, list):
        return len(read) == len(written) and all(map(_is_same, read, written))
    return bool(read == written or (read != read and written != written))


def _verify(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest['format']}, this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        _verify_file(folder / name, expected)


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes, {expected['bytes']} were saved")
    if _entry(path) != expected:
        raise CheckpointError(f"{path} is corrupt: its sha256 differs from the manifest")


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
