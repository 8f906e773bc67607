"""Reads the completions that a run has written, step by step. For any thread; files are opened anew each time."""

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from parallm.errors import RolloutsDamaged, UnknownObject
from parallm.metrics.rollout_format import MAX_BYTES, RolloutFile, StepSummary, decode, decode_summary, header_bytes

NAME = re.compile(r"step_(\d{6,12})\.safetensors")
NUM_DECODED = 2
"""Steps whose files stay decoded: a person reads one group after the other."""


def file_name(step: int) -> str:
    return f"step_{step:06d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepListing:
    """The steps that can be read, and those that cannot."""

    steps: list[StepSummary]
    """In order."""
    damaged: dict[int, str]
    """Why the file of a step cannot be read."""
    num_dropped: int = 0
    """Steps of this process whose completions were not written, because the writer was behind."""


@dataclass(slots=True, eq=False)
class RolloutFolder:
    """The files of one run, below `folder`.

    `newest` returns the content of a step that is still in memory, as bytes, if it is.
    """

    folder: Path
    newest: Callable[[], dict[int, bytes]] = dict
    num_dropped: Callable[[], int] = int
    _summaries: dict[tuple[int, int, int], StepSummary | str] = field(default_factory=dict)
    _decoded: OrderedDict[tuple[int, int, int], RolloutFile] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listing(self) -> StepListing:
        """Read the summary of each step, once for each file."""
        newest = self.newest()
        found: dict[int, StepSummary | str] = {}
        seen: dict[tuple[int, int, int], StepSummary | str] = {}
        for step, key, path in self._files():
            if (summary := self._summaries.get(key)) is None:
                try:
                    summary = _read_summary(path)
                except RolloutsDamaged as error:
                    summary = str(error)
                except FileNotFoundError:  # gone since the folder was listed
                    continue
            found[step] = seen[key] = summary
        self._summaries = seen
        for step, content in newest.items():
            if not isinstance(found.get(step), dict):
                found[step] = decode_summary(content)
        return StepListing(
            steps=[found_step for _, found_step in sorted(found.items()) if not isinstance(found_step, str)],
            damaged={step: reason for step, reason in sorted(found.items()) if isinstance(reason, str)},
            num_dropped=self.num_dropped(),
        )

    def read(self, step: int) -> RolloutFile:
        """Read the completions of `step`. Raises UnknownObject if there are none, RolloutsDamaged."""
        content, path = self.newest().get(step), self.folder / file_name(step)
        try:
            key = (step, len(content), 0) if content is not None else _key(step, path.lstat())
        except (OSError, ValueError) as error:
            raise UnknownObject(f"no completions of step {step} are kept; the list has those that are") from error
        with self._lock:
            if key in self._decoded:
                self._decoded.move_to_end(key)
                return self._decoded[key]
        decoded = decode(_read(path) if content is None else content)
        with self._lock:
            self._decoded[key] = decoded
            while len(self._decoded) > NUM_DECODED:
                self._decoded.popitem(last=False)
        return decoded

    def _files(self) -> list[tuple[int, tuple[int, int, int], Path]]:
        """Step, identity and path of each file."""
        try:
            with os.scandir(self.folder) as entries:
                named = [(match, entry) for entry in entries if (match := NAME.fullmatch(entry.name))]
                return [
                    (int(match[1]), _key(int(match[1]), entry.stat(follow_symlinks=False)), Path(entry.path))
                    for match, entry in named
                ]
        except OSError:
            return []


def _key(step: int, status: os.stat_result) -> tuple[int, int, int]:
    return step, status.st_size, status.st_mtime_ns


def _read_summary(path: Path) -> StepSummary:
    with _open(path) as file:
        beginning = file.read(8)
        return decode_summary(beginning + file.read(header_bytes(beginning) - 8))


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _open(path: Path) -> BinaryIO:
    """Open an ordinary file that is no link, without waiting for the writer of a pipe. Raises RolloutsDamaged."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RolloutsDamaged(f"it cannot be opened: {error.strerror}") from error
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
        return file
    file.close()
    raise RolloutsDamaged("it is no ordinary file, or larger than any that is written")
