"""Checkpoints of a run of several workers: rank 0 writes them, and hands out the one to resume from.

The others wait until rank 0 has written one. A worker whose exchange has failed, then or at any other time, saves the
last finished step in its own folder, `RUN/ranks/R`. The next start of the run, with any number of workers, adopts the
newest of these if rank 0 had not saved that step.
"""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from parallm.checkpoint.format import read_checkpoint
from parallm.checkpoint.manager import CheckpointManager, checkpoint_folders, checkpoint_step, set_aside
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import Fingerprint, RunFacts, TrainingState
from parallm.distributed.team import RANKS
from parallm.distributed.wire import pack, unpack
from parallm.errors import CheckpointError, ExchangeFailed

Share = Callable[[str, bytes], Future[list[bytes]]]
"""Gathers one part of each rank, under a label."""
HANDED_OUT = "checkpoint"

RECEIVED = "received"
"""Folder of a worker with what rank 0 has handed out."""

logger = logging.getLogger(__name__)


class SharedCheckpoints(CheckpointManager):
    """Saves nothing once the workers' versions differ. Called from the device thread."""

    def __init__(self, folder: Path, settings: CheckpointSettings, *, share: Share, flaw: Callable[[], str]) -> None:
        """`flaw`: why a state must not be saved; empty if it may be."""
        super().__init__(folder, settings)
        self._share = share
        self._flaw = flaw

    def save(self, state: TrainingState) -> Path:
        if flaw := self._flaw():
            raise CheckpointError(flaw)
        return super().save(state)


class LeaderCheckpoints(SharedCheckpoints):
    """The checkpoints of rank 0: those of the run."""

    def save(self, state: TrainingState) -> Path:
        """Save, and tell the others. Raises CheckpointError."""
        try:
            folder = super().save(state)
        except CheckpointError as error:
            self._share(_label(state), str(error).encode())
            raise
        self._share(_label(state), b"")  # the others wait for it, rank 0 for none
        return folder

    def load(
        self, resume: str, fingerprint: Fingerprint | None = None, facts: RunFacts | None = None
    ) -> TrainingState | None:
        """As `CheckpointManager.load`; hands the state and the best checkpoint to all workers.

        Sets checkpoints of other runs aside, so that `adopt_rescued` compares steps of this run alone.
        """
        state = super().load(resume, fingerprint, facts)
        if resume != "auto":
            is_own = self._folder.resolve() in Path(resume).resolve().parents
            self._set_newer_aside(state.step if state is not None and is_own else -1)
        if resume != "never":
            path = self.checkpoints()[-1] if resume == "auto" and state is not None else Path(resume)
            content = _packed(None, None) if state is None else _packed(path, self.best())
            self._share(HANDED_OUT, content).result()
        return state

    def _set_newer_aside(self, step: int) -> None:
        for path in self.checkpoints():
            if checkpoint_step(path) > step:
                set_aside(path, "this run does not go on from it (checkpoint.resume)")


class FollowerCheckpoints(SharedCheckpoints):
    """The checkpoints of the other ranks: in their own folder, and only what rank 0 can no longer save."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        *,
        leader: Path,
        share: Share,
        flaw: Callable[[], str],
    ) -> None:
        """`leader`: the run folder."""
        super().__init__(folder, settings, share=share, flaw=flaw)
        self._leader = leader
        self._received = folder / RECEIVED
        self._best: Path | None = None

    def save(self, state: TrainingState) -> Path:
        """Wait until rank 0 has saved the same, and return its folder; save here if rank 0 is lost meanwhile.

        Raises CheckpointError, also for what keeps rank 0 from saving.
        """
        try:
            error = self._share(_label(state), b"").result()[0].decode()
        except ExchangeFailed:
            return self.rescue(state)
        if error:
            raise CheckpointError(error)
        return self._leader / f"step_{state.step:06d}"

    def rescue(self, state: TrainingState) -> Path:
        """Save here: rank 0 may be lost, or have saved nothing since. Raises CheckpointError."""
        return super().save(state)

    def load(
        self, resume: str, fingerprint: Fingerprint | None = None, facts: RunFacts | None = None
    ) -> TrainingState | None:
        """Load what rank 0 hands out, which has decided that it fits."""
        shutil.rmtree(self._received, ignore_errors=True)
        self._best = None
        if resume == "never":
            return None
        state, self._best = _unpack(self._share(HANDED_OUT, b"").result()[0], self._received)
        return read_checkpoint(state) if state is not None else None

    def best(self) -> Path | None:
        """The best checkpoint when the run began, as rank 0 has handed it out."""
        return self._best


def _label(state: TrainingState) -> str:
    return f"checkpoint of step {state.step}"


def adopt_rescued(folder: Path) -> None:
    """Move newer checkpoints that workers have saved after a failure to those of the run; delete the others."""
    rescued = [path for own in sorted((folder / RANKS).glob("*/")) for path in checkpoint_folders(own)]
    own = checkpoint_folders(folder)
    for path in sorted(rescued, key=lambda path: path.name, reverse=True):
        final = folder / path.name
        if final.exists() or (own and path.name < own[-1].name):
            shutil.rmtree(path)
        else:
            path.rename(final)
            logger.warning("%s is what worker %s has saved when the workers lost each other", final, path.parent.name)


def _packed(state: Path | None, best: Path | None) -> bytes:
    """The bytes of the checkpoint to resume from and of the best one, and which is which."""
    is_both = state is not None and best is not None and state.resolve() == best.resolve()
    roles = {"state": state, "best": None if is_both else best}
    files = {
        f"{role}/{path.relative_to(folder).as_posix()}": np.frombuffer(path.read_bytes(), np.uint8)
        for role, folder in roles.items()
        if folder is not None
        for path in folder.rglob("*")
        if path.is_file()
    }
    names = {"state": state and "state", "best": best and ("state" if is_both else "best")}
    return pack({**names, "files": list(files)}, list(files.values()))


def _unpack(content: bytes, folder: Path) -> tuple[Path | None, Path | None]:
    """Write both checkpoints below `folder`; return the one to resume from, and the best."""
    head, blocks = unpack(content)
    for name, block in zip(head["files"], blocks, strict=True):
        path = _inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(block.tobytes())
    state, best = (None if head[role] is None else _inside(folder, head[role]) for role in ("state", "best"))
    return state, best


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"rank 0 hands out {name}, which is outside of a checkpoint")
    return path
