"""Reads the files of a run, which anybody may have written: in bounded time and memory, below the run's folder alone.

Every function blocks: call it on a thread. Links are not followed below the folder of all runs, and nothing but plain
files is opened. Lines that cannot be read are left out; what a limit stops is an error that names the limit.
"""

import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import yaml

from parallm.errors import RunUnreadable
from parallm.metrics.history import STEP, History
from parallm.metrics.recent_log import MAX_CHARACTERS, LogLine

MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_SMALL_BYTES = 1024 * 1024
"""Bytes of a configuration, a summary, and of the end of a log that is read."""
MAX_LINE_BYTES = 1024 * 1024
MAX_SECONDS = 20.0
"""Time to read one file."""
BLOCK_BYTES = 1024 * 1024
"""Bytes that are read at once. Each read lets go of Python's lock and takes it again before a waiting thread is awake,
which then waits its whole interval anew: small blocks keep the event loop waiting until the file ends.
"""
MAX_ITEMS = 5000
"""Rows of evaluations, happenings and the like that one answer holds, and values of a configuration."""
MAX_ENTRIES = 20_000
"""Entries of one folder."""
MAX_DEPTH = 32
METRICS, EVALUATIONS, HAPPENINGS = "metrics.jsonl", "evaluations.jsonl", "happenings.jsonl"
CONFIG, SUMMARY, LOG, LOCK = "config.yaml", "summary.json", "run.log", "process.lock"
FAULTS = "faults"
CHECKPOINT = re.compile(r"step_(\d{1,15})")
FAULT_FILE = re.compile(r"step_(\d{1,15})\.jsonl")
LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]{4,8}) ([\w.]{1,100}): (.*)", re.DOTALL)

Row: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder below `root`, named by the parts of its path, none of which may be a link."""

    root: Path
    parts: tuple[str, ...] = ()

    def below(self, *parts: str) -> "RunFolder":
        return RunFolder(self.root, (*self.parts, *parts))

    def above(self) -> "RunFolder":
        """Return the folder around this one; the root stays itself."""
        return RunFolder(self.root, self.parts[:-1])

    @property
    def path(self) -> Path:
        return self.root.joinpath(*self.parts)

    @property
    def name(self) -> str:
        """Name for people."""
        return "/".join(self.parts) or self.root.name


@contextmanager
def opened_folder(folder: RunFolder) -> Iterator[int]:
    """Yield a descriptor of the folder. Raises OSError where a part is a link or no folder."""
    descriptor = os.open(folder.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folder.parts:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_file(folder: RunFolder, name: str) -> Iterator[BinaryIO]:
    """Yield a plain file. Raises OSError for anything else, which is not waited for either."""
    with opened_folder(folder) as descriptor:
        inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    with os.fdopen(inner, "rb", BLOCK_BYTES) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{name} is no plain file")
        yield file


def entries(folder: RunFolder) -> list[os.DirEntry[str]]:
    """Return what a folder holds in the order of names; nothing where it cannot be read. Links are left out."""
    found: list[os.DirEntry[str]] = []
    try:
        with opened_folder(folder) as descriptor, os.scandir(descriptor) as scan:
            for entry, _ in zip(scan, range(MAX_ENTRIES), strict=False):
                if not entry.is_symlink() and _is_plain(entry.name):
                    with suppress(OSError):
                        entry.stat(follow_symlinks=False)  # kept in the entry: the descriptor is closed later
                        found.append(entry)
    except OSError:
        return []
    return sorted(found, key=lambda entry: entry.name)


def key_of(folder: RunFolder, name: str) -> Key | None:
    """Return what changes with the file's content; None where there is no plain file."""
    try:
        with opened_file(folder, name) as file:
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def rows_of(folder: RunFolder, name: str) -> Iterator[Row]:
    """Yield the readable rows of a file of lines of JSON. Raises RunUnreadable."""
    try:
        with opened_file(folder, name) as file:
            yield from _rows(file, f"{name} of {folder.name}")
    except OSError:
        return


def last_row(folder: RunFolder, name: str) -> Row:
    """Return the last readable row of a file; an empty one without any."""
    for line in reversed(tail(folder, name, 4 * MAX_SMALL_BYTES // 64).split(b"\n")):
        if (row := _row(line)) is not None:
            return row
    return {}


def history_of(folder: RunFolder) -> History:
    """Return the history of a run. Rows out of the order of steps are left out. Raises RunUnreadable."""
    history, last = History(), -1
    try:
        for row in rows_of(folder, METRICS):
            step = row.get(STEP)
            if isinstance(step, int) and step > last:
                with suppress(ValueError):
                    history.append(row)
                    last = step
                    continue
                if len(history) > 1:
                    raise RunUnreadable(
                        f"{METRICS} of {folder.name}: {len(history)} rows fit in memory, and there are more"
                    )
    except MemoryError as error:
        raise RunUnreadable(f"{METRICS} of {folder.name} does not fit in memory") from error
    return history


def newest_rows(folder: RunFolder, name: str, limit: int, keep: Callable[[Row], bool] = lambda _: True) -> list[Row]:
    """Return the last rows that `keep` takes, in their order. Raises RunUnreadable."""
    return list(deque((row for row in rows_of(folder, name) if keep(row)), maxlen=min(limit, MAX_ITEMS)))


def tail(folder: RunFolder, name: str, num_bytes: int) -> bytes:
    """Return the end of a file from the beginning of a line on; empty where it cannot be read."""
    try:
        with opened_file(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes)
    except OSError:
        return b""
    return text if size <= num_bytes else text.partition(b"\n")[2]


def small_file(folder: RunFolder, name: str) -> bytes:
    """Return a file of up to `MAX_SMALL_BYTES`; empty where there is none. Raises RunUnreadable for a larger one."""
    try:
        with opened_file(folder, name) as file:
            content = file.read(MAX_SMALL_BYTES + 1)
    except OSError:
        return b""
    if len(content) > MAX_SMALL_BYTES:
        raise RunUnreadable(
            f"{name} of {folder.name} is larger than {MAX_SMALL_BYTES} bytes, the limit of what is shown"
        )
    return content


def json_file(folder: RunFolder, name: str) -> Row:
    """Return the object in a small file; an empty one where it cannot be read. Raises as `small_file`."""
    return _row(small_file(folder, name)) or {}


def config_of(folder: RunFolder) -> Row:
    """Return the values of a run's configuration by dotted keys. Raises RunUnreadable."""
    text = small_file(folder, CONFIG).decode(errors="replace")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # aliases let a few bytes stand for any number of values
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader)):
            raise RunUnreadable(f"{CONFIG} of {folder.name} has aliases, which a composed configuration never has")
        values = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise RunUnreadable(f"{CONFIG} of {folder.name} cannot be read: {str(error)[:200]}") from error
    flat: Row = {}
    if not isinstance(values, Mapping):
        return flat
    _flatten(values, "", flat, folder, MAX_DEPTH)
    return flat


def log_lines(folder: RunFolder) -> list[LogLine]:
    """Return the lines at the end of a run's log; a record of several lines is one."""
    lines: list[LogLine] = []
    for text in tail(folder, LOG, MAX_SMALL_BYTES).decode(errors="replace").split("\n"):
        if (line := _log_line(text)) is not None:
            lines.append(line)
        elif lines and text and len(lines[-1].text) < MAX_CHARACTERS:
            last = lines.pop()
            more = f"{last.text}\n{text}"[:MAX_CHARACTERS]
            lines.append(LogLine(time=last.time, level=last.level, logger=last.logger, text=more))
    return lines


def checkpoints_of(folder: RunFolder) -> list[Row]:
    """Return the checkpoints of a run by step."""
    found = []
    for entry in entries(folder):
        if (match := CHECKPOINT.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False):
            files = [file.stat(follow_symlinks=False) for file in entries(folder.below(entry.name))]
            saved = max((file.st_mtime for file in files), default=entry.stat(follow_symlinks=False).st_mtime)
            num_bytes = sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
            found.append({"name": entry.name, "step": int(match[1]), "time": round(saved, 3), "bytes": num_bytes})
    return sorted(found, key=lambda row: row["step"])


def fault_steps(folder: RunFolder) -> dict[int, float]:
    """Return the steps with a file of faults, and the times of the files."""
    found = [(FAULT_FILE.fullmatch(entry.name), entry) for entry in entries(folder.below(FAULTS))]
    return {int(match[1]): round(entry.stat(follow_symlinks=False).st_mtime, 3) for match, entry in found if match}


def faults_of(folder: RunFolder, step: int, limit: int) -> list[Row]:
    """Return the rows of a step's faults. Raises RunUnreadable."""
    return [row for row, _ in zip(rows_of(folder.below(FAULTS), f"step_{step}.jsonl"), range(limit), strict=False)]


def is_running(folder: RunFolder) -> bool:
    """Return whether the process that locked the folder is alive."""
    text = tail(folder, LOCK, 20).strip()
    if not text.isdigit():
        return False
    try:
        os.kill(int(text), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return int(text) > 1


def _rows(file: BinaryIO, what: str) -> Iterator[Row]:
    size, ends = os.fstat(file.fileno()).st_size, time.monotonic() + MAX_SECONDS
    if size > MAX_FILE_BYTES:
        raise RunUnreadable(f"{what} has {size} bytes, the limit is {MAX_FILE_BYTES}")
    is_inside = False  # a line that is too long
    num_bytes = 0
    while line := file.readline(MAX_LINE_BYTES):
        num_bytes += len(line)
        if num_bytes > MAX_FILE_BYTES:  # it grows as fast as it is read
            raise RunUnreadable(f"{what} has more than {MAX_FILE_BYTES} bytes, the limit")
        if time.monotonic() > ends:
            raise RunUnreadable(f"{what} takes more than {MAX_SECONDS:g} s to read, the limit")
        was_inside, is_inside = is_inside, not line.endswith(b"\n")
        if not was_inside and (row := _row(line)) is not None:
            yield row


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _log_line(text: str) -> LogLine | None:
    text = text[:MAX_CHARACTERS]
    if match := LOG_LINE.fullmatch(text):
        with suppress(ValueError, OverflowError, OSError):
            began = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone().timestamp() + int(match[2]) / 1000
            return LogLine(time=round(began, 3), level=match[3], logger=match[4], text=match[5])
    if text.startswith("{") and (row := _row(text.encode(errors="replace"))) is not None:
        with suppress(ValueError, OverflowError, OSError, TypeError):
            began = datetime.fromisoformat(row["time"]).timestamp() if "time" in row else 0.0
            words = {name: str(row.get(name, "")) for name in ("level", "logger", "message")}
            level = words["level"].upper()[:20]
            return LogLine(time=began, level=level, logger=words["logger"][:100], text=words["message"])
    return None


def _flatten(value: object, key: str, flat: Row, folder: RunFolder, depth: int) -> None:
    if isinstance(value, Mapping) and value:
        if not depth:
            raise RunUnreadable(f"{CONFIG} of {folder.name} is nested more than {MAX_DEPTH} deep, the limit")
        for name, item in value.items():
            _flatten(item, f"{key}.{name}" if key else str(name), flat, folder, depth - 1)
        return
    if len(flat) >= MAX_ITEMS:
        raise RunUnreadable(f"{CONFIG} of {folder.name} has more than {MAX_ITEMS} values, the limit")
    flat[key] = value if isinstance(value, bool | int | float | str | None) else _shown(value)


def _shown(value: object) -> object:
    """Return lists as they are where they are short, and text for all else."""
    if (
        isinstance(value, Sequence)
        and len(value) <= 100
        and all(isinstance(item, bool | int | float | str) for item in value)
    ):
        return list(value)
    return json.dumps(value, default=str)[:MAX_CHARACTERS]


def _is_plain(name: str) -> bool:
    """Return whether a name can be shown and named again: no control characters, no half of a character."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.isprintable()
