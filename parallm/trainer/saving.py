"""When and how the trainer saves: a full disk costs a checkpoint, not the run."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from parallm.checkpoint.manager import CheckpointManager
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
    ) -> None:
        self._device = device
        self._checkpoints = checkpoints
        self._make_state = make_state
        self._every = every
        self.saved_step = 0  # of the newest checkpoint; written by `save` and by whoever resumes a run

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    async def save(self) -> Path:
        """Save the state after the last finished step; the checkpoint's folder. Raises CheckpointError."""
        state = self._make_state()
        folder = await asyncio.wrap_future(self._device.call(lambda: self._checkpoints.save(state)))
        self.saved_step = state.step
        return folder

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

    PEFT's is left out, with a warning, where transformers' names of the layers are not known. Raises CheckpointError
    if the disk does not take it.
    """
    depth = model.num_layers
    try:
        if is_reward_model(adapter):
            write_exactly(adapter, folder / "adapter", num_layers=depth, base_name=model.name, base_sha256=model.sha256)
            return
        write_mlx(adapter, folder / "adapter", num_layers=depth)
        write_peft(adapter, folder / "adapter_peft", model.name, model_type=model.model_type)
    except AdapterError as error:
        logger.warning("adapter_peft is left out: %s", error)
    except OSError as error:
        raise CheckpointError(
            f"{folder / 'adapter'} could not be written: {error}; the same adapter is in the last checkpoint"
        ) from error


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
