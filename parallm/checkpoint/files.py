"""One checkpoint as a folder of files: written in place, synced, and verified against its manifest when read.

Knows nothing of other checkpoints, of temporary folders or of falling back: see `manager`.
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
from parallm.checkpoint.trajectory_lines import groups_from_lines, groups_to_lines
from parallm.errors import AdapterError, CheckpointError
from parallm.model.adapters.files import read_adapter, read_arrays, write_arrays, write_exactly

logger = logging.getLogger(__name__)

ADAPTER = "adapter"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
TRAJECTORIES = "trajectories.jsonl"
MANIFEST = "manifest.json"
FORMAT = 1
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Errors of reading a damaged file; Python's json gives up on deep nesting with RecursionError."""


def write_checkpoint(state: TrainingState, folder: Path) -> None:
    """Write the files of `state` into `folder`, which exists and is empty, and wait until the disk has them.

    Raises OSError if the disk does not take them, TypeError, ValueError or RuntimeError for what cannot be written.
    """
    made_of = state.fingerprint
    write_exactly(
        state.adapter,
        folder / ADAPTER,
        num_layers=made_of.num_layers,
        base_name=made_of.model,
        base_sha256=made_of.model_sha256,
    )
    write_arrays(folder / OPTIMIZER, state.optimizer, {"format": "mlx"})
    (folder / STATE).write_text(_state_text(state))
    (folder / TRAJECTORIES).write_text(groups_to_lines(state.groups))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): _entry(path) for path in files}
    # no line end: without its last byte it must not be a manifest
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=2))
    for path in (*files, folder / MANIFEST, folder / ADAPTER, folder):
        sync(path)


def read_checkpoint(folder: Path) -> TrainingState:
    """Verify sizes and checksums of all files, then read them. Raises CheckpointError with the first fault."""
    try:
        _verify(folder)
        values = json.loads((folder / STATE).read_text())
        saved = values["fingerprint"]
        return TrainingState(
            step=values["step"],
            version=values["version"],
            adapter=read_adapter(folder / ADAPTER),
            optimizer=read_arrays(folder / OPTIMIZER)[0],
            schedule_step=values["schedule_step"],
            counters=values["counters"],
            groups=groups_from_lines((folder / TRAJECTORIES).read_text()),
            score=values["score"],
            fingerprint=Fingerprint(**(saved | {"targets": tuple(saved["targets"])})),
            facts=RunFacts(**values["facts"]) if values.get("facts") is not None else None,
        )
    except (AdapterError, *DAMAGE, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def read_score(folder: Path) -> float | None:
    """The evaluation of a checkpoint without reading or verifying the rest; None if there is none or it is damaged."""
    score = _state_value(folder, "score")
    return score if isinstance(score, float) and math.isfinite(score) else None


def read_version(folder: Path) -> int | None:
    """The adapter version of a checkpoint without reading or verifying the rest; None if it is damaged."""
    version = _state_value(folder, "version")
    return version if isinstance(version, int) else None


def needed_bytes(state: TrainingState) -> int:
    """About how much disk `write_checkpoint` takes."""
    arrays = [*state.adapter.arrays.values(), *state.optimizer.values()]
    # 256 bytes of header an array; a token with its log-probability takes about 40 as text; room for the small files
    trajectories = [trajectory for group in state.groups for trajectory in group.trajectories]
    text = sum(40 * len(t.prompt_tokens + t.tokens) + 2 * len(t.text) for t in trajectories)
    return sum(array.nbytes + 256 for array in arrays) + text + 65536


def write_atomically(file: Path, text: str) -> None:
    """Replace `file`: whatever happens it holds the old text or the new one. Raises OSError, changing nothing.

    A disk that does not confirm the new name costs a warning: only a power failure could still bring the old text back.
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
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _state_value(folder: Path, key: str) -> object:
    """None where the state is damaged, or no ordinary file: a pipe would be waited for."""
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
        "schedule_step": state.schedule_step,
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
    """Whether both hold the same values, NaN at the same places."""
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
