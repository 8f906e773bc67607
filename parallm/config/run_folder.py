"""The folder of a run: where it lies, whether it can be written, and the link `latest` beside it. Imports no MLX."""

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
"""In the folder of a policy that learns from clients."""
SERVING = "serving-"
"""What the folder with what operators have set begins with; the beginning of the base's digest follows."""
SWEEP_PREFIX = "sweep_"
LATEST_RUN = "latest"
"""Beside the runs of a name: a link to the one that began last."""
LOG, CONFIG = "run.log", "config.yaml"
LEFT_BY_ANY_START = {LOG, CONFIG, "summary.json", "curves.png", "multirun.yaml"}
"""Files of a start in which nothing has happened; the last one is Hydra's, of a sweep."""
ROOM_TO_START = 65_536
"""Bytes of the log and the configuration, with some to spare."""

logger = logging.getLogger(__name__)


def run_folder(name: str, resume: str, now: str) -> str:
    """Where a run writes: `checkpoints/NAME/NOW`.

    With `resume=auto`, the newest run folder of that name that holds a checkpoint, trajectories of clients or what
    operators have set, if there is one: the run goes on in it. A checkpoint named by its folder starts a new run, so
    that the run it came from stays as it is.
    """
    # Hydra makes the folder before a wrong name is refused
    runs = RUNS_FOLDER / (str(name) if re.match(NAME_PATTERN, str(name)) else "run")
    if resume == "auto":
        begun = [
            folder
            for folder in runs.glob("*/")
            if (has_checkpoint(folder) or has_trajectories(folder) or has_serving_state(folder))
            and not (folder.is_symlink() or folder.name.startswith(SWEEP_PREFIX))
        ]
        if begun:
            return str(max(begun, key=lambda folder: folder.name))
    return str(runs / now)


def export_folder(name: str, output: str | None, now: str) -> str:
    """Where an export without an `output` writes; with one the current folder, in which nothing is made then."""
    return run_folder(name, "never", now) if output is None else "."


def has_checkpoint(folder: Path) -> bool:
    """Whether the checkpoint manager has saved anything in this run folder or in one of its policies, good or not."""
    return any(True for pattern in ("step_*/", "*/step_*/") for _ in folder.glob(pattern))


def has_trajectories(folder: Path) -> bool:
    """Whether completions of clients were collected in this run folder or for one of its policies."""
    return any(True for pattern in (TRAJECTORIES, f"*/{TRAJECTORIES}") for _ in folder.glob(pattern))


def has_serving_state(folder: Path) -> bool:
    """Whether operators have set anything while a run in this folder was served."""
    return any(True for _ in folder.glob(f"{SERVING}*/serving.json"))


def check_writable(folder: Path) -> None:
    """Make `folder` where it is missing. Raises RunFolderError if it does not take what every run writes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM_TO_START))
            file.flush()
    except OSError as error:
        raise folder_error(folder, error) from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder, before anything of a run is written. Raises FolderInUse."""
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
    """What is wrong with a run folder that cannot be written, and the way out."""
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    reason = f"{nearest} is a file" if nearest.is_file() else error.strerror
    return RunFolderError(
        f"the run folder {folder} cannot be written: {reason}; make room for it, start in another folder, or name one "
        "with hydra.run.dir=FOLDER"
    )


def remove_unused(folder: Path) -> None:
    """Remove the folder of a start in which nothing has happened, and the folders above it that are empty then.

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
    """Let `checkpoints/NAME/latest` name this run. Replaced in one step; a disk without links costs a warning."""
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
    """Let `latest` name the newest run that there still is, if it has named `folder`."""
    link = runs / LATEST_RUN
    if not (link.is_symlink() and link.resolve() == folder.resolve()):
        return
    link.unlink()
    others = [path for path in runs.glob("*/") if not path.name.startswith((SWEEP_PREFIX, SERVING))]
    if others:
        link_latest(max(others, key=lambda path: path.name))


def _runs_of(folder: Path) -> Path | None:
    """The folder of all runs of a name; None for a folder that is no run below `checkpoints`."""
    folder, checkpoints = folder.resolve(), RUNS_FOLDER.resolve()
    inside = folder.relative_to(checkpoints).parts if checkpoints in folder.parents else ()
    return checkpoints / inside[0] if len(inside) > 1 else None
