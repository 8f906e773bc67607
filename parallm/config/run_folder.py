"""The folder of a run: its path, whether it is writable, and the link `latest` beside it. Imports no MLX."""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from parallm.checkpoint.folder_lock import folder_locked
from parallm.errors import FolderInUse, RunFolderError

RUNS_FOLDER = Path("checkpoints")
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
TRAJECTORIES = "trajectories.jsonl"
"""File in the folder of a policy that learns from clients."""
SERVING = "serving-"
"""Prefix of the folder with the state that operators have set; the beginning of the base's digest follows."""
NETS = f"{SERVING}nets"
"""Folder of the policy nets that clients have published."""
BEGUN = (
    *("step_*/", "*/step_*/", "ranks/*/step_*/", TRAJECTORIES, f"*/{TRAJECTORIES}"),
    *(f"{SERVING}*/serving.json", f"{NETS}/nets.json"),
)
"""What a run goes on from, in its folder or in that of one of its policies."""
SWEEP_PREFIX = "sweep_"
LATEST_RUN = "latest"
"""Link to the last run of a name, beside the runs."""
LOG, CONFIG = "run.log", "config.yaml"
LEFT_BY_ANY_START = {LOG, CONFIG, "summary.json", "curves.png", "happenings.jsonl", "multirun.yaml"}
"""Files of a start without any work; the last one is Hydra's, for a sweep."""
START_BYTES = 65_536
"""Bytes that the log and the configuration need at most."""

logger = logging.getLogger(__name__)


def run_folder(name: str, resume: str, now: str) -> str:
    """Return the folder of a run: `checkpoints/NAME/NOW`.

    `resume=auto` continues in the newest folder of that name that holds a checkpoint, trajectories of clients or a
    state of operators, if there is one. A checkpoint that is named by its folder starts a new run, so that its own run
    stays unchanged.
    """
    # Hydra makes the folder before we can refuse a wrong name
    runs = RUNS_FOLDER / (str(name) if re.match(NAME_PATTERN, str(name)) else "run")
    if resume == "auto":
        begun = [
            folder
            for folder in runs.glob("*/")
            if has_begun(folder) and not (folder.is_symlink() or folder.name.startswith(SWEEP_PREFIX))
        ]
        if begun:
            return str(max(begun, key=lambda folder: folder.name))
    return str(runs / now)


def export_folder(name: str, output: str | None, now: str) -> str:
    """Return the folder of an export without `output`; with one the current folder, in which nothing is written."""
    return run_folder(name, "never", now) if output is None else "."


def has_begun(folder: Path) -> bool:
    """Whether a run folder holds a checkpoint, complete or not, trajectories of clients or a state of operators."""
    return any(True for pattern in BEGUN for _ in folder.glob(pattern))


def check_writable(folder: Path) -> None:
    """Make `folder` if it is missing. Raises RunFolderError if it cannot hold the files of every run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(START_BYTES))
            file.flush()
    except OSError as error:
        raise folder_error(folder, error) from error


@contextmanager
def locked_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes, before a run writes into it. Raises FolderInUse."""
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_locked(folder))
        except FolderInUse as error:
            raise FolderInUse(
                f"the run folder {error}; wait until that has ended, or choose another folder with name=NAME or "
                "hydra.run.dir=FOLDER"
            ) from error
        yield


def folder_error(folder: Path, error: OSError) -> RunFolderError:
    """Return why a run folder cannot be written, with the way out."""
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    reason = f"{nearest} is a file" if nearest.is_file() else error.strerror
    return RunFolderError(
        f"the run folder {folder} cannot be written: {reason}; make room for it, start in another folder, or name one "
        "with hydra.run.dir=FOLDER"
    )


def remove_unused(folder: Path) -> None:
    """Remove the folder of a start without any work, and the folders above it that are then empty.

    Folders outside of `checkpoints` stay.
    """
    runs = _runs_of(folder)
    if runs is None or not folder.is_dir() or any(_tells_of_a_run(path) for path in folder.rglob("*")):
        return
    shutil.rmtree(folder, ignore_errors=True)
    _forget(folder, runs)
    for above in (folder.parent, runs, RUNS_FOLDER):
        with suppress(OSError):  # it holds something else
            above.rmdir()


def link_latest(folder: Path) -> None:
    """Point `checkpoints/NAME/latest` to this run, in one step. A disk without links costs a warning."""
    runs = _runs_of(folder)
    if runs is None:
        return
    temporary = runs / f".{LATEST_RUN}-{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.resolve().relative_to(runs), target_is_directory=True)
        temporary.replace(runs / LATEST_RUN)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.warning("%s does not name this run: %s", runs / LATEST_RUN, error)


def _tells_of_a_run(path: Path) -> bool:
    return not path.is_dir() and path.name not in LEFT_BY_ANY_START


def _forget(folder: Path, runs: Path) -> None:
    """Point `latest` to the newest remaining run, if it points to `folder`."""
    link = runs / LATEST_RUN
    if not (link.is_symlink() and link.resolve() == folder.resolve()):
        return
    link.unlink()
    others = [path for path in runs.glob("*/") if not path.name.startswith((SWEEP_PREFIX, SERVING))]
    if others:
        link_latest(max(others, key=lambda path: path.name))


def _runs_of(folder: Path) -> Path | None:
    """Return the folder of all runs of a name; None for a folder that is no run below `checkpoints`."""
    folder, checkpoints = folder.resolve(), RUNS_FOLDER.resolve()
    inside = folder.relative_to(checkpoints).parts if checkpoints in folder.parents else ()
    return checkpoints / inside[0] if len(inside) > 1 else None
