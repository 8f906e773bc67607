"""`parallm.train` in this process, on a model that is given."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.run import train
from parallm.run.runtime import EngineParts, open_runtime


def train_on(
    make: Callable[[], SharedModel], config: RunConfig, folder: Path, blas: BlasReport, **more: Any
) -> tuple[int, SharedModel]:
    """The exit code of a run on what `make` gives, whatever model.path says, and that model. `make` is called on the
    device thread. Raises RuntimeError if the run loaded another."""
    made: list[SharedModel] = []

    def load(_: ModelSettings) -> SharedModel:
        made.append(make())
        return made[0]

    vars(train)["open_runtime"] = partial(open_runtime, parts=EngineParts(load=load))
    code = train.run_training(config, folder, blas, **more)
    if not made:
        raise RuntimeError(f"the run, which ended with {code}, was not on the model given")
    return code, made[0]
