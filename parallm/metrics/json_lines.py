"""A file with one JSON object per line that survives kill -9 and full disks, and is valid JSON even for NaN."""

import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from numbers import Real
from pathlib import Path
from typing import Any

import pydantic_core

MAX_BYTES = 64 * 1024 * 1024
"""Most bytes of rows that wait in memory while the disk refuses them."""

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends rows that hold a `step`; each row is on disk (handed to the system) when `append` returns.

    Rows that the disk refuses wait in memory, with one warning, and are written before the next ones.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        # a process that was killed may have left half a line
        self._is_torn = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
        self._unwritten: deque[_Line] = deque()
        self._num_written = 0  # bytes of the first of these that are in the file
        self._drop_from: int | None = None
        self._has_failed = False

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write `rows`. A disk that refuses costs nothing but memory, up to `MAX_BYTES`."""
        # a backslash escape of a lone surrogate is what JSON asks for
        encoded = [(row["step"], f"{to_json(row)}\n".encode(errors="backslashreplace")) for row in rows]
        self._unwritten.extend(_Line(step, text) for step, text in encoded)
        self.flush()

    def drop_from(self, step: int) -> None:
        """Remove rows of `step` and later, and unreadable lines, which an interrupted run has left."""
        self._unwritten = deque(line for line in self._unwritten if line.step < step)
        self._drop_from = step if self._drop_from is None else min(step, self._drop_from)
        self.flush()

    def flush(self) -> None:
        """Try again to write what waits."""
        try:
            self._drop()
            self._write()
        except OSError as error:
            self._warn_once(error)
            self._bound_memory()
        else:
            self._has_failed = False

    def _drop(self) -> None:
        if self._drop_from is not None and self.file.is_file():
            kept = [row for row in read_rows(self.file) if row["step"] < self._drop_from]
            write_whole(self.file, "".join(to_json(row) + "\n" for row in kept))
            self._is_torn, self._num_written = False, 0
        self._drop_from = None

    def _write(self) -> None:
        if not self._unwritten:
            return
        with open_to_append(self.file) as lines:
            if self._is_torn:
                lines.write(b"\n")
                self._is_torn = False
            while self._unwritten:
                self._num_written += lines.write(self._unwritten[0].text[self._num_written :])
                if self._num_written == len(self._unwritten[0].text):
                    self._unwritten.popleft()
                    self._num_written = 0

    def _bound_memory(self) -> None:
        num_bytes = sum(len(line.text) for line in self._unwritten)
        if num_bytes <= MAX_BYTES:
            return
        logger.warning("%d rows of %s wait in memory, the oldest rows are let go", self.num_unwritten, self.file)
        while num_bytes > MAX_BYTES // 2:  # so that it is said once in a while, and not with each row
            num_bytes -= len(self._unwritten.popleft().text)
            self._is_torn |= self._num_written > 0
            self._num_written = 0

    def _warn_once(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning("cannot write %s: %s; its rows wait in memory until it can", self.file, error.strerror)
        self._has_failed = True


@dataclass(frozen=True, slots=True)
class _Line:
    step: int
    text: bytes


def open_to_append(file: Path) -> FileIO:
    """Open without a buffer, so that `write` returns how much a full disk has taken."""
    return FileIO(file, "ab")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the readable rows that hold a number `step`; half-written and damaged lines are left out."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            to_json(row)  # it may be written again, which deep nesting prevents even where it could be read
        except (ValueError, RecursionError):
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


def encode_json(value: object) -> bytes:
    """Return JSON in one line as `to_json` does, in UTF-8; a lone surrogate is written as its escape."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null", fallback=finite)
    except (ValueError, UnicodeEncodeError):  # a lone surrogate, which a model may have written
        return json.dumps(finite(value), allow_nan=False).encode()


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
