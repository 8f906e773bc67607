"""The checkpoints of one run: saved whole or not at all, pruned, and found again. The trainer's `Saver` calls it."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from parallm.checkpoint.format import MANIFEST, needed_bytes, read_checkpoint, read_score, sync, write_checkpoint
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import Fingerprint, RunFacts, TrainingState
from parallm.errors import CheckpointError, InvalidRequest

logger = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"step_(\d+)")
NAMED = "named"
CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
TEMPORARY = ".tmp-"
REPLACED = ".old-"
ASIDE = "aside_"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointManager:
    """Owns `step_*` in the folder of a run. Called from the device thread, because it evaluates arrays."""

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        """Make the folder if needed, and clean up after processes that died while saving."""
        self._folder = folder
        self.settings = settings
        folder.mkdir(parents=True, exist_ok=True)
        self._clean_up()

    def save(self, state: TrainingState) -> Path:
        """Save `state` as `step_{step}`, then delete all checkpoints but the newest and the best.

        Raises CheckpointError if it cannot be written; older checkpoints stay, and nothing is left over.
        """
        final = self._folder / f"step_{state.step:06d}"
        self._write(state, final)
        for path in self.checkpoints():
            if checkpoint_step(path) > state.step:
                set_aside(path, f"it is newer than step {state.step}, from which this run went on")
        self._prune()
        logger.info("saved %s", final)
        return final

    def rescue(self, state: TrainingState) -> Path:
        """Save `state` after an error that ends the run. Raises CheckpointError."""
        return self.save(state)

    def save_as(self, state: TrainingState, name: str) -> Path:
        """Save `state` as `named/NAME`, which is never deleted. Raises CheckpointError, InvalidRequest."""
        self.check_name(name)
        final = self._folder / NAMED / name
        self._write(state, final)
        logger.info("saved %s", final)
        return final

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest if the name is not allowed or a checkpoint has it."""
        if not CHECKPOINT_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:100]!r} cannot be the name of a checkpoint; use up to 64 letters, digits and _ . -",
                "checkpoint_name",
            )
        if (self._folder / NAMED / name).exists():
            raise InvalidRequest(
                f"there is a checkpoint called {name} already, which stays; choose another name", "checkpoint_name"
            )

    def load(
        self, resume: str, fingerprint: Fingerprint | None = None, facts: RunFacts | None = None
    ) -> TrainingState | None:
        """The state to resume from. `resume` is `never`, `auto` or a folder; None for `never` and if `auto` finds none.

        `auto` sets damaged checkpoints aside with a warning. Raises CheckpointError if the named folder cannot be read,
        or if the state does not fit `fingerprint` and `facts`.
        """
        if resume == "never":
            return None
        path, state = self._newest_good() if resume == "auto" else self._named(Path(resume))
        if state is None:
            return None
        if fingerprint is not None:
            fingerprint.check_fits(state.fingerprint, str(path))
        if facts is not None and state.facts is not None:
            facts.check_fits(state.facts, str(path), is_same_run=resume == "auto")
        logger.info("resuming from %s", path)
        return state

    def checkpoints(self) -> tuple[Path, ...]:
        """Checkpoint folders, oldest first; not verified."""
        return checkpoint_folders(self._folder)

    def best(self) -> Path | None:
        """The checkpoint with the highest evaluation, the newest of equals; None if none was evaluated."""
        return best_checkpoint(self.checkpoints())

    def _write(self, state: TrainingState, final: Path) -> None:
        temporary = self._folder / f"{TEMPORARY}{final.name}-{os.getpid()}"
        needed = needed_bytes(state)
        try:
            if shutil.disk_usage(self._folder).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
            write_checkpoint(state, temporary)
            if final.parent != self._folder:
                final.parent.mkdir(exist_ok=True)
                sync(self._folder)
            rename_into_place(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._save_error(final, error, needed) from error
        except (TypeError, ValueError, RuntimeError) as error:  # a bad counter must not end the run
            raise CheckpointError(f"{final} could not be saved: {error}; older checkpoints are unchanged") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _save_error(self, final: Path, error: OSError, needed: int) -> CheckpointError:
        if error.errno not in DISK_FULL:
            return CheckpointError(f"{final} could not be saved: {error}; older checkpoints are unchanged")
        free = shutil.disk_usage(self._folder).free
        return CheckpointError(
            f"{final} could not be saved, the disk is full: {free:,} bytes are free, about {needed:,} are needed; free "
            "some space or lower checkpoint.keep; older checkpoints are unchanged"
        )

    def _newest_good(self) -> tuple[Path, TrainingState | None]:
        paths = self.checkpoints()
        for path in reversed(paths):
            try:
                return path, read_checkpoint(path)
            except CheckpointError as error:
                set_aside(path, str(error))
        if paths:
            logger.warning("none of the %d checkpoints of %s is good: the run begins anew", len(paths), self._folder)
        return self._folder, None

    def _named(self, path: Path) -> tuple[Path, TrainingState]:
        check_named(path, self._folder)
        return path, read_checkpoint(path)

    def _prune(self) -> None:
        keep = {*self.checkpoints()[-self.settings.keep :], self.best()}
        for path in self.checkpoints():
            if path not in keep:
                _delete(path)

    def _clean_up(self) -> None:
        for path in self._folder.glob(f"{REPLACED}*"):
            original = path.with_name(path.name.removeprefix(REPLACED))
            if original.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(original)
                logger.warning("restored %s, whose replacement was interrupted", original)
        for path in self._folder.glob(f"{TEMPORARY}*"):
            if not _is_running(path.name.rpartition("-")[2]):
                shutil.rmtree(path, ignore_errors=True)
                logger.info("removed %s, left by a process that ended while saving", path)


def set_aside(path: Path, reason: str) -> None:
    """Rename `path` so that nothing reads it. Raises CheckpointError."""
    names = (path.with_name(f"{ASIDE}{path.name}.{number}") for number in count())
    aside = next(name for name in names if not name.exists())
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointError(f"{path} should be set aside, as {reason}; that failed: {error}") from error
    logger.warning("%s was set aside as %s: %s", path, aside.name, reason)


def rename_into_place(temporary: Path, final: Path) -> None:
    """Rename the folder `temporary` to `final`, replacing it. Raises OSError, changing nothing."""
    replaced = final.with_name(f"{REPLACED}{final.name}")
    if replaced.exists():  # an earlier save could not delete it
        _delete(replaced)
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def check_named(path: Path, run_folder: Path) -> None:
    """Raise CheckpointError, naming the checkpoints of both folders, if `path` is no checkpoint."""
    if (path / MANIFEST).is_file():
        return
    choices = [str(choice) for choice in (*checkpoint_folders(path), *checkpoint_folders(run_folder))]
    raise CheckpointError(
        f"checkpoint.resume={path} is no checkpoint: it has no {MANIFEST}; name never, auto or "
        f"{'one of ' + ', '.join(choices) if choices else 'a folder step_N of another run'}"
    )


def best_checkpoint(checkpoints: Iterable[Path]) -> Path | None:
    """The checkpoint with the highest evaluation, the newest of equals; None if none was evaluated."""
    scores = [(score, path) for path in checkpoints if (score := read_score(path)) is not None]
    return max(scores, key=lambda pair: (pair[0], checkpoint_step(pair[1])))[1] if scores else None


def checkpoint_folders(folder: Path) -> tuple[Path, ...]:
    """The checkpoints in a run's folder, oldest first; not verified."""
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)), key=checkpoint_step))


def checkpoint_step(path: Path) -> int:
    """The step that the name of a checkpoint folder gives."""
    return int(path.name.removeprefix("step_"))


def _delete(path: Path) -> None:
    # renamed first: half a checkpoint must never have a checkpoint's name
    names = (path.with_name(f"{TEMPORARY}{path.name}.{number}-{os.getpid()}") for number in count())
    doomed = next(name for name in names if not name.exists())
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _is_running(process_id: str) -> bool:
    """Whether another process has this id. Our own is not saving here."""
    if not process_id.isdigit() or int(process_id) in (0, os.getpid()):
        return False
    try:
        os.kill(int(process_id), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
