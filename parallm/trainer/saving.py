"""Saving and restoring of a run: a full disk costs a checkpoint, not the run. `Loop` and `run` call it."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallm.checkpoint.format import sync
from parallm.checkpoint.manager import TEMPORARY, CheckpointManager, rename_into_place
from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, CheckpointError, ParallmError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter, write_exactly, write_mlx, write_peft
from parallm.model.shared_model import SharedModel
from parallm.trainer.context import TrainerContext
from parallm.types import BEST

logger = logging.getLogger(__name__)


class Saver:
    """Saves the state that `make_state` returns, on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        checkpoints: CheckpointManager,
        make_state: Callable[[], TrainingState],
        *,
        on_save: Callable[[int], None],
    ) -> None:
        """`on_save` gets the step of each checkpoint after the disk has it."""
        self._device = device
        self._checkpoints = checkpoints
        self._make_state = make_state
        self._every = checkpoints.settings.every
        self._on_save = on_save
        self.num_saves = 0
        self.saved_step = 0  # step of the newest checkpoint; set by `save` and by `Loop.resume`

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    async def save(self) -> Path:
        """Save the state after the last finished step. Returns the folder. Raises CheckpointError."""
        return await self._write(self._checkpoints.save)

    async def save_as(self, name: str) -> Path:
        """Save it as a named checkpoint, which is never deleted. Raises CheckpointError."""
        state = self._make_state()
        folder = await asyncio.wrap_future(self._device.call(lambda: self._checkpoints.save_as(state, name)))
        self.num_saves += 1
        return folder

    def mark_outdated(self) -> None:
        """Mark the newest checkpoint as outdated, after an update between steps."""
        self.saved_step = -1

    async def try_save(self) -> None:
        """Save; log a disk error and let training go on."""
        try:
            await self.save()
        except CheckpointError as error:
            logger.error("%s; training goes on, the next try is in %d steps", error, self._every)

    async def rescue(self) -> None:
        """Save the steps before an error, if the disk allows."""
        try:
            await self._write(self._checkpoints.rescue)
        except ParallmError as error:
            logger.error("the steps since the last checkpoint are lost: %s", error)

    async def _write(self, write: Callable[[TrainingState], Path]) -> Path:
        state = self._make_state()
        folder = await asyncio.wrap_future(self._device.call(lambda: write(state)))
        self.num_saves += 1
        self.saved_step = state.step
        self._on_save(state.step)
        return folder


def write_adapter(adapter: Adapter, folder: Path, model: SharedModel) -> None:
    """Write `adapter` in mlx-lm's and PEFT's formats, one for vectors or with a head in one of them only.

    `parallm.export` writes such an adapter for other programs, with what they need to know of it.

    PEFT's format is left out, with a warning, if transformers' names of the layers are unknown. Each folder is replaced
    whole. Raises CheckpointError for the first that the disk refuses.
    """
    depth = model.num_layers
    if adapter.spec is not None:
        write = partial(write_exactly, num_layers=depth, base_name=model.name, base_sha256=model.sha256)
        _put(folder / "adapter", lambda path: write(adapter, path))
        return
    _put(folder / "adapter", lambda path: write_mlx(adapter, path, num_layers=depth))
    try:
        _put(
            folder / "adapter_peft",
            lambda path: write_peft(adapter, path, model.name, model_type=model.model_type),
        )
    except AdapterError as error:
        logger.warning("adapter_peft is left out: %s", error)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; version {adapter.version} is in {folder / 'adapter'}") from error


def _put(final: Path, write: Callable[[Path], None]) -> None:
    """Write a folder and rename it to `final`. Raises CheckpointError if the disk refuses."""
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}")
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        rename_into_place(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written: {error}") from error


def fingerprint_of(model: SharedModel, start: Adapter) -> Fingerprint:
    """The fingerprint of a run that starts from `start`. Reads some of the base, on the device thread."""
    return Fingerprint(
        model=model.name,
        model_sha256=model.sha256,
        num_layers=model.num_layers,
        rank=start.rank,
        alpha=start.alpha,
        targets=start.targets,
        ranks=dict(start.ranks),
        rslora=start.rslora,
        dora=start.is_dora,
    )


def restore(context: TrainerContext, state: TrainingState, *, serve: bool) -> None:
    """Restore the learner, the newest version, and the best version on disk under its alias.

    Without `serve` the trainer decides what clients get. Raises CheckpointError if `model.adapter` is a later version
    than the checkpoint's. Runs on the device thread.
    """
    versions_in_memory = _versions(context)
    if max(versions_in_memory, default=0) > state.version:
        raise CheckpointError(
            f"model.adapter is version {max(versions_in_memory)} of {context.policy}, and the checkpoint version "
            f"{state.version}: resuming would sample from the former; leave model.adapter out"
        )
    # a named checkpoint may be another policy's; dropout is a setting of this run
    newest = replace(state.adapter, name=context.policy, dropout=context.learner.adapter.dropout)
    context.learner.restore(newest, dict(state.optimizer))
    versions = {state.version: newest}
    best = context.checkpoints.best()
    best_adapter = _best_adapter(best, context.policy) if best is not None else None
    if best_adapter is not None and 0 < best_adapter.version <= state.version:
        versions.setdefault(best_adapter.version, best_adapter)
    for version in sorted(versions):
        if version > max(versions_in_memory, default=0):
            context.adapters.publish(versions[version], serve=serve)
    if best_adapter is not None and best_adapter.version in _versions(context):
        context.adapters.set_alias(BEST, best_adapter.version, name=context.policy)


def _versions(context: TrainerContext) -> set[int]:
    """Versions of the policy in memory."""
    return {card.version for card in context.adapters.cards() if card.name == context.policy}


def _best_adapter(checkpoint: Path, policy: str) -> Adapter | None:
    try:
        return read_adapter(checkpoint / "adapter", name=policy)
    except AdapterError as error:
        logger.warning("the alias %s is not restored: %s", BEST, error)
        return None
