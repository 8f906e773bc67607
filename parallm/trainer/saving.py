"""When and how the trainer saves: a full disk costs a checkpoint, not the run."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parallm.checkpoint.files import sync
from parallm.checkpoint.manager import TEMPORARY, CheckpointManager, put_in_place
from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, CheckpointError, ParallmError
from parallm.model.adapter import Adapter
from parallm.model.adapter_files import write_exactly, write_mlx, write_peft
from parallm.model.reward_head import is_reward_model
from parallm.model.shared_model import SharedModel

logger = logging.getLogger(__name__)


class Saver:
    """Writes what `make_state` returns, on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        checkpoints: CheckpointManager,
        make_state: Callable[[], TrainingState],
        *,
        every: int,
        on_save: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_save` gets the step of each checkpoint when the disk has it."""
        self._device = device
        self._checkpoints = checkpoints
        self._make_state = make_state
        self._every = every
        self._on_save = on_save
        self.num_saves = 0
        self.saved_step = 0  # of the newest checkpoint; written by `save` and by whoever resumes a run

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    async def save(self) -> Path:
        """Save the state after the last finished step; the checkpoint's folder. Raises CheckpointError."""
        state = self._make_state()
        folder = await asyncio.wrap_future(self._device.call(lambda: self._checkpoints.save(state)))
        self.num_saves += 1
        self.saved_step = state.step
        self._on_save(state.step)
        return folder

    async def save_as(self, name: str) -> Path:
        """The same as a checkpoint of this name, which stays. Raises CheckpointError."""
        state = self._make_state()
        folder = await asyncio.wrap_future(self._device.call(lambda: self._checkpoints.save_as(state, name)))
        self.num_saves += 1
        return folder

    def forget(self) -> None:
        """The newest checkpoint lacks what has been learned since."""
        self.saved_step = -1

    async def try_save(self) -> None:
        """`save` while there are steps to come, which a full disk must not prevent."""
        try:
            await self.save()
        except CheckpointError as error:
            logger.error("%s; training goes on, the next try is in %d steps", error, self._every)

    async def rescue(self) -> None:
        """Save what the steps before an error have learned, if the disk takes it."""
        try:
            await self.save()
        except ParallmError as error:
            logger.error("the steps since the last checkpoint are lost: %s", error)


def write_adapter(adapter: Adapter, folder: Path, model: SharedModel) -> None:
    """Write `adapter` in both formats, for use elsewhere; a reward model in the one that knows such.

    PEFT's is left out, with a warning, where transformers' names of the layers are not known. Each folder is whole or
    as it was before. Raises CheckpointError for the first that the disk does not take, which names the one before it.
    """
    depth = model.num_layers
    if is_reward_model(adapter):
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
    """Raises CheckpointError where the disk does not take it."""
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}")
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        put_in_place(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written: {error}") from error


def fingerprint_of(model: SharedModel, start: Adapter) -> Fingerprint:
    """Of a run that starts from `start`. Reads some of the base's values, on the device thread."""
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
