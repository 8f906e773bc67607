"""The runs below some folders: a list of them, and what each has left. Imports no MLX.

A run is a folder `NAME/TIME` with the files of a run; its id is `NAME~TIME`. Every method blocks: call it on a thread.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from parallm.errors import RunUnreadable, UnknownObject
from parallm.metrics import run_files
from parallm.metrics.history import History
from parallm.metrics.json_lines import finite
from parallm.metrics.run_files import Key, Row, RunFolder

FILES = (run_files.CONFIG, run_files.METRICS)
"""Files, one of which every run has."""
TIME_FORMATS = ("%Y-%m-%d_%H-%M-%S-%f", "%Y-%m-%d_%H-%M-%S")
SECONDS_BETWEEN_SCANS = 2.0
MAX_RUNS = 10_000
MAX_POLICIES = 64
MAX_FIGURES = 100
MAX_HISTORIES = 8
"""Histories of other runs in memory."""
MAX_ROWS = 4096
"""Rows of the list in memory."""
SWEEP, HIDDEN = "sweep_", "."

Value = TypeVar("Value")


class RunFolders:
    """For any thread. What was read once is kept until its file changes; two readers of one file wait for one read."""

    def __init__(self, roots: Sequence[Path], current: Path | None = None) -> None:
        """`roots` hold runs at `NAME/TIME`, or at `TIME`, or are runs; `current` is the run of this process."""
        self._roots = tuple(root.absolute() for root in roots)
        self._current = None if current is None else current.absolute()
        self._scanned = float("-inf")
        self._folders: Mapping[str, RunFolder] = {}
        self._guard = threading.Lock()
        self._histories: _Kept[History] = _Kept(MAX_HISTORIES)
        self._rows: _Kept[Row] = _Kept(MAX_ROWS)
        self._configs: _Kept[Row] = _Kept(MAX_ROWS // 64)

    def folders(self) -> Mapping[str, RunFolder]:
        """Return all runs by id, the newest first."""
        with self._guard:
            if time.monotonic() - self._scanned > SECONDS_BETWEEN_SCANS:
                self._folders = _scan(self._roots, self._current)
                self._scanned = time.monotonic()
            return self._folders

    def folder(self, run: str, policy: str | None = None) -> RunFolder:
        """Return the folder of a run, or of one of several policies, the first without a name. Raises UnknownObject."""
        found = self.folders().get(run)
        if found is None:
            raise UnknownObject(f"no run {run[:200]!r}; GET /v1/runs lists those that can be read")
        policies = policies_of(found)
        if policy is None:
            return found.below(policies[0]) if policies else found
        if policy in policies:
            return found.below(policy)
        if policies or policy != "policy":
            raise UnknownObject(
                f"run {run[:200]!r} has no policy {policy[:100]!r}; it has {', '.join(policies) or 'policy'}"
            )
        return found

    def history(self, folder: RunFolder) -> History:
        """Return the history of a run as its file has it now. Raises RunUnreadable."""
        key = run_files.key_of(folder, run_files.METRICS)
        return self._histories.get(folder, key, lambda: run_files.history_of(folder))

    def config(self, folder: RunFolder) -> Row:
        """Return the values of a configuration by dotted keys. Raises RunUnreadable."""
        key = run_files.key_of(folder, run_files.CONFIG)
        return self._configs.get(folder, key, lambda: run_files.config_of(folder))

    def row(self, run: str, folder: RunFolder) -> Row:
        """Return a run as lists show it."""
        policies = policies_of(folder)
        own = folder.below(policies[0]) if policies else folder
        metrics, summary = (run_files.key_of(own, name) for name in (run_files.METRICS, run_files.SUMMARY))
        is_running = run_files.is_running(folder)
        kept = self._rows.get(
            own, (*(metrics or _NO_FILE)[2:], *(summary or _NO_FILE)[2:]), lambda: self._read_row(own)
        )
        total = self._total_steps(folder, policies)
        ended = None if summary is None or is_running else summary[2] / 1e9
        return {
            "id": run,
            "name": folder.path.parent.name,
            "began": _began(folder),
            "ended": None if ended is None else round(ended, 3),
            "state": "running" if is_running else _state(kept["step"], total, has_summary=summary is not None),
            "step": kept["step"],
            "total_steps": total,
            "policies": policies,
            "figures": kept["figures"],
        }

    def _read_row(self, folder: RunFolder) -> Row:
        try:
            summary = run_files.json_file(folder, run_files.SUMMARY)
        except RunUnreadable:
            summary = {}
        step = run_files.last_row(folder, run_files.METRICS).get("step")
        return {"step": step if isinstance(step, int) else 0, "figures": _figures(summary.get("figures"))}

    def _total_steps(self, folder: RunFolder, policies: Sequence[str]) -> int | None:
        try:
            values = self.config(folder)
        except RunUnreadable:
            return None
        own = [f"policies.{policies[0]}.trainer.steps"] if policies else []
        steps = next((values[key] for key in (*own, "trainer.steps") if key in values), None)
        return steps if isinstance(steps, int) else None


_NO_FILE: Key = (0, 0, 0, 0)


class _Kept(Generic[Value]):
    """Values read from files, the least recently used of which are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[RunFolder, tuple[object, Value]] = OrderedDict()
        self._guard = threading.Lock()
        self._reading: WeakValueDictionary[RunFolder, _Turn] = WeakValueDictionary()

    def get(self, folder: RunFolder, key: object, read: Callable[[], Value]) -> Value:
        """Return the value, which `read` makes where there is none of this key. Raises what it raises."""
        with self._guard:
            turn = self._reading.setdefault(folder, _Turn())
        with turn.lock:
            with self._guard:
                kept = self._values.get(folder)
                if kept is not None and kept[0] == key:
                    self._values.move_to_end(folder)
                    return kept[1]
            value = read()
            with self._guard:
                self._values[folder] = (key, value)
                self._values.move_to_end(folder)
                while len(self._values) > self._limit:
                    self._values.popitem(last=False)
            return value


class _Turn:
    """The readers of one file, one after the other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def policies_of(folder: RunFolder) -> list[str]:
    """Return the names of a run's policies, where there are several."""
    names = {entry.name for entry in run_files.entries(folder)}
    if run_files.METRICS in names:
        return []
    inner = [entry.name for entry in run_files.entries(folder) if entry.is_dir(follow_symlinks=False)][:MAX_POLICIES]
    return [name for name in inner if run_files.key_of(folder.below(name), run_files.METRICS) is not None]


def _scan(roots: Sequence[Path], current: Path | None) -> dict[str, RunFolder]:
    folders = [folder for root in roots for folder in _runs_below(root)]
    if current is not None and current not in {folder.path for folder in folders}:
        folders.append(RunFolder(current))
    folders.sort(key=lambda folder: (folder.path.name, folder.path.parent.name), reverse=True)
    found: dict[str, RunFolder] = {}
    for folder in folders[:MAX_RUNS]:
        name = f"{folder.path.parent.name}~{folder.path.name}"
        number = sum(other == name or other.startswith(f"{name}~") for other in found) if name in found else 0
        found[f"{name}~{number + 1}" if number else name] = folder
    return found


def _runs_below(root: Path) -> Iterator[RunFolder]:
    """Yield the runs at, in, or two folders below `root`."""
    top = RunFolder(root)
    if _is_run(top):
        yield top
        return
    for name in _inner_folders(top):
        outer = top.below(name)
        if _is_run(outer):
            yield outer
            continue
        for inner in _inner_folders(outer):
            if _is_run(outer.below(inner)):
                yield outer.below(inner)
            elif inner.startswith(SWEEP):
                jobs = (outer.below(inner, job) for job in _inner_folders(outer.below(inner)))
                yield from (job for job in jobs if _is_run(job))


def _inner_folders(folder: RunFolder) -> list[str]:
    inner = [entry.name for entry in run_files.entries(folder) if entry.is_dir(follow_symlinks=False)]
    return [name for name in inner if not name.startswith(HIDDEN)]


def _is_run(folder: RunFolder) -> bool:
    return any(run_files.key_of(folder, name) is not None for name in FILES)


def _began(folder: RunFolder) -> float | None:
    """Return the time in the folder's name, else that of its configuration."""
    for form in TIME_FORMATS:
        with suppress(ValueError, OverflowError, OSError):
            return round(datetime.strptime(folder.path.name, form).astimezone().timestamp(), 3)
    key = run_files.key_of(folder, run_files.CONFIG)
    return None if key is None else round(key[2] / 1e9, 3)


def _state(step: int, total: int | None, *, has_summary: bool) -> str:
    if not has_summary:
        return "unknown"  # killed, or on another machine
    return "finished" if total is not None and step >= total else "stopped"


def _figures(figures: object) -> dict[str, float]:
    """Return the numbers of a summary without the prefix of their names."""
    if not isinstance(figures, Mapping):
        return {}
    named = {str(name).rpartition(".")[2][:100]: number for name, number in figures.items()}
    numbers = {name: finite(number) for name, number in named.items() if not isinstance(number, str | bool)}
    plain = {name: number for name, number in numbers.items() if isinstance(number, int | float)}
    return dict(list(plain.items())[:MAX_FIGURES])
