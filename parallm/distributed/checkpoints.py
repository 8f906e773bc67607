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

from parallm.checkpoint.manager import (
    CheckpointManager,
    best_checkpoint,
    checkpoint_folders,
    checkpoint_step,
    set_aside,
)
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import Fingerprint, RunFacts, TrainingState
from parallm.distributed.team import RANKS
from parallm.distributed.wire import pack, unpack
from parallm.errors import CheckpointError, ExchangeFailed

Share = Callable[[str, bytes], Future[list[bytes]]]
"""Gathers one part of each rank, under a label."""
HANDED_OUT = "checkpoint"

RECEIVED = Path("received") / "run"
"""Folder of a worker with what rank 0 has handed out; deeper than that of a policy would be."""

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
            newest = self.checkpoints()[-1:] if resume == "auto" else (Path(resume),)
            best = self.best()
            folders = [path for path in (best, *newest) if path is not None] if state is not None else []
            self._share(HANDED_OUT, _packed(list(dict.fromkeys(folders)))).result()
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
        if resume == "never":
            return None
        shutil.rmtree(self._received, ignore_errors=True)
        _unpack(self._share(HANDED_OUT, b"").result()[0], self._received)
        return CheckpointManager(self._received, self.settings).load("auto")

    def best(self) -> Path | None:
        return best_checkpoint(checkpoint_folders(self._received))


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


def _packed(folders: list[Path]) -> bytes:
    files = {
        path.relative_to(folder.parent).as_posix(): np.frombuffer(path.read_bytes(), np.uint8)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }
    return pack(list(files), list(files.values()))


def _unpack(content: bytes, folder: Path) -> None:
    names, blocks = unpack(content)
    for name, block in zip(names, blocks, strict=True):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"rank 0 hands out {name}, which is outside of a checkpoint")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(block.tobytes())
