"""A file with one JSON object per line that survives kill -9 and full disks, and is valid JSON even for NaN."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends rows that hold a `step`; each row is on disk (handed to the system) when `append` returns."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # a process that was killed may have left half a line
        self._is_torn = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
        self._has_failed = False

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write `rows`. A disk that refuses costs these rows, with a warning, and not the run."""
        text = "".join(to_json(row) + "\n" for row in rows)
        if not text:
            return
        try:
            # a backslash escape of a lone surrogate is what JSON asks for
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as lines:
                lines.write("\n" + text if self._is_torn else text)
        except OSError as error:
            self._is_torn = True
            self._warn_once(error)
        else:
            self._is_torn = self._has_failed = False

    def drop_from(self, step: int) -> None:
        """Remove rows of `step` and later, and unreadable lines, which an interrupted run has left."""
        if not self.file.is_file():
            return
        kept = [row for row in read_rows(self.file) if row["step"] < step]
        try:
            write_whole(self.file, "".join(to_json(row) + "\n" for row in kept))
        except OSError as error:
            self._warn_once(error)
        else:
            self._is_torn = False

    def _warn_once(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning("cannot write %s: %s; rows are missing there until it can", self.file, error)
        self._has_failed = True


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the readable rows that hold a number `step`; half-written lines are left out."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def write_whole(file: Path, text: str) -> None:
    """Replace `file` so that a reader or a crash sees either the old text or the new one."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(file)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return JSON that every reader accepts: NaN and infinities become null."""
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


def finite(value: object) -> object:
    """Return `value` with null for each number that JSON cannot hold, and plain numbers for those of NumPy."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [finite(item) for item in value]
    return str(value)
