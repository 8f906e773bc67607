"""A file of JSON lines, written off the event loop and read when a run resumes.

Used by `TrajectoryBuffer`, and for the groups of Atropos that are refused.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from parallm.checkpoint import format

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]
"""The object of a line, made JSON in the writing thread: nothing may change it any more."""
OWNER_ONLY = 0o600


class Journal:
    """Lines reach the operating system in the order of the calls; `written` waits for that.

    Lines that wait are written together, and synced to the disk after `written` has returned: a killed process loses
    nothing that `written` has returned for, a power failure only its last moment. Lines that the disk refuses are
    written with the next ones. Only the file's owner may read it.
    """

    def __init__(self, file: Path, to_json: Callable[[Any], object] | None = None) -> None:
        """`to_json` is for values that JSON does not know, like the `default` of `json.dumps`."""
        self._file = file
        self._to_json = to_json
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._lock = threading.Lock()
        self._waiting: list[_Entry] = []  # guarded by the lock
        self._refused: list[_Entry] = []  # owned by the writing thread, like the next three
        self._is_torn = _ends_within_a_line(file)
        self._lacks_lines = False  # the file lacks refused lines that only the waiting rewrite still has
        self._unsynced: set[Path] = set()
        self._last: Future[None] | None = None
        self.num_lines = 0
        """Lines since the file was last written anew."""

    def append(self, line: Line) -> None:
        self.num_lines += 1
        self._put(_Entry((line,), replaces=False))

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Replace the lines of the file by these, which mean the same. On a full disk the old ones stay."""
        entry = _Entry(tuple(lines), replaces=True)
        self.num_lines = len(entry.lines)
        self._put(entry)

    async def written(self) -> None:
        """Wait until the operating system has every line so far. Raises OSError."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))

    def close(self) -> None:
        """Wait until everything is on the disk."""
        self._thread.shutdown()

    def _put(self, entry: "_Entry") -> None:
        with self._lock:
            self._waiting.append(entry)
        self._last = self._thread.submit(self._write_waiting)
        self._thread.submit(self._sync)

    def _write_waiting(self) -> None:
        with self._lock:
            entries, self._waiting = [*self._refused, *self._waiting], []
        if not entries:
            return  # an earlier call has written them
        try:
            self._write(entries)
        except OSError as error:
            if not self._refused:
                logger.warning(
                    "cannot write %s: %s; what clients send is lost if the process ends before it can",
                    self._file,
                    error,
                )
            index = _last_replacing(entries)
            self._lacks_lines = self._lacks_lines or bool(index)
            self._refused = entries[index or 0 :]
            raise
        self._refused = []

    def _sync(self) -> None:
        try:
            while self._unsynced:
                format.sync(self._unsynced.pop())
        except OSError as error:
            logger.warning("%s could not be synced to the disk: %s", self._file, error)

    def _write(self, entries: Sequence["_Entry"]) -> None:
        index = _last_replacing(entries)
        if index is not None:
            try:
                self._replace(self._text(entries[index]))
                entries = entries[index + 1 :]
            except OSError:
                if self._lacks_lines:
                    raise
        self._append("".join(self._text(entry) for entry in entries if not entry.replaces))

    def _text(self, entry: "_Entry") -> str:
        # ASCII: a text may hold half a surrogate pair
        return "".join(json.dumps(line, default=self._to_json) + "\n" for line in entry.lines)

    def _replace(self, text: str) -> None:
        temporary = self._file.with_name(self._file.name + ".tmp")
        try:
            with _opened(temporary, "w") as lines:
                lines.write(text)
                lines.flush()
                os.fsync(lines.fileno())
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._is_torn = self._lacks_lines = False
        self._unsynced |= {self._file, self._file.parent}

    def _append(self, text: str) -> None:
        if not text:
            return
        with _opened(self._file, "a") as lines:
            is_torn, self._is_torn = self._is_torn, True
            lines.write("\n" + text if is_torn else text)
        self._is_torn = False
        self._unsynced.add(self._file)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Lines to append, or to replace all others with."""

    lines: tuple[Line, ...]
    replaces: bool


def read_journal(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the readable lines; a killed process may have left half of one."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(values, dict):
                yield values


def _opened(file: Path, mode: Literal["a", "w"]) -> TextIO:
    file.touch(OWNER_ONLY)
    return file.open(mode, encoding="utf-8")


def _ends_within_a_line(file: Path) -> bool:
    if not file.is_file() or file.stat().st_size == 0:
        return False
    with file.open("rb") as content:
        content.seek(-1, os.SEEK_END)
        return content.read() != b"\n"


def _last_replacing(entries: Sequence[_Entry]) -> int | None:
    return next((index for index in reversed(range(len(entries))) if entries[index].replaces), None)
