"""Other programs that show a run: Weights & Biases, trackio, TensorBoard. `RunRecorder` hands over its rows.

Whatever goes wrong there is reported once and costs the run nothing but that program.
"""

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import finite
from parallm.metrics.settings import MetricsSettings

COMPLETION_COLUMNS = ("step", "problem_id", "prompt", "completion", "answer", "reward", "version", "finish_reason")
"""Columns of the table of completions."""

EVALUATED = "heldout/version"
"""Name that every row of an evaluation has, and no other."""

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class Tracker(ABC):
    """One program. Methods may raise anything."""

    @abstractmethod
    def log(self, row: Row, completions: Sequence[Row]) -> None:
        """Take the numbers of a row with a `step` and a `time`, and the completions that belong to it."""

    @abstractmethod
    def finish(self, figures: Row) -> None:
        """Take the figures of the whole run, and end."""


class Trackers:
    """All programs that `metrics` names. A failing one is left out from then on."""

    def __init__(self, folder: Path, settings: MetricsSettings, config: Row) -> None:
        makers: dict[str, Callable[[], Tracker]] = {}
        if settings.wandb != "off":
            makers["wandb"] = lambda: Wandb(folder, settings, config)
        if settings.trackio:
            makers["trackio"] = lambda: Trackio(folder, settings, config)
        if settings.tensorboard:
            makers["tensorboard"] = lambda: TensorBoard(folder)
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            self._try(name, "start", partial(self._start, name, make))

    def log(self, row: Row, completions: Sequence[Row] = ()) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, "log", partial(tracker.log, row, completions))

    def finish(self, figures: Row) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, "finish", partial(tracker.finish, figures))
        self._trackers.clear()

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        self._trackers[name] = make()

    def _try(self, name: str, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a reporting program raises must not end the run
            logger.warning("%s failed to %s and is off from here on: %s: %s", name, what, type(error).__name__, error)
            self._trackers.pop(name, None)


class Wandb(Tracker):
    """Weights & Biases. A resumed run folder continues the same run there, by the id in `wandb_id.txt`."""

    def __init__(self, folder: Path, settings: MetricsSettings, config: Row) -> None:
        import wandb  # noqa: PLC0415 - optional, and takes seconds to import

        self._table = wandb.Table
        id_file = folder / "wandb_id.txt"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run: Any = wandb.init(
            project=settings.project,
            name=run_name(folder),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            mode=settings.wandb,
            config=dict(config),
            # its capture of the console would fight with the live display
            settings=wandb.Settings(console="off", silent=True, init_timeout=30, finish_timeout=60),
        )
        # a resumed run logs steps again that were lost with the process, which wandb's own counter refuses
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Row, completions: Sequence[Row]) -> None:
        table = {"completions": self._table(list(COMPLETION_COLUMNS), _cells(completions))} if completions else {}
        self._run.log({**numbers(row), **table})

    def finish(self, figures: Row) -> None:
        self._run.summary.update(numbers(figures))
        self._run.finish()


class Trackio(Tracker):
    """trackio, whose data stay on this machine; a resumed run folder continues the run of its name."""

    def __init__(self, folder: Path, settings: MetricsSettings, config: Row) -> None:
        import trackio  # noqa: PLC0415 - an extra

        plain = finite(config)
        assert isinstance(plain, dict), "a configuration is a mapping"
        self._run: Any = trackio.init(
            project=settings.project, name=run_name(folder), resume="allow", config=plain, embed=False
        )

    def log(self, row: Row, completions: Sequence[Row]) -> None:
        self._run.log({name: value for name, value in numbers(row).items() if name != "step"}, step=row["step"])

    def finish(self, figures: Row) -> None:
        self._run.finish()


class TensorBoard(Tracker):
    """Files of events in `tensorboard/` of the run folder; steps that come again replace the lost ones."""

    def __init__(self, folder: Path) -> None:
        import tensorboardX  # noqa: PLC0415 - takes a second to import

        self._make: Any = tensorboardX.SummaryWriter
        self._folder = str(folder / "tensorboard")
        self._writer: Any = None

    def log(self, row: Row, completions: Sequence[Row]) -> None:
        step, now = row["step"], row["time"]
        if self._writer is None:  # a run that goes on may begin with an evaluation of the last step that is kept
            first = step + 1 if EVALUATED in row else step
            self._writer = self._make(self._folder, purge_step=first, flush_secs=10)
        for name, value in numbers(row).items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step, walltime=now)
        for index, completion in enumerate(completions):
            text = (
                f"{completion['prompt']}\n\n---\n\n{completion['completion']}\n\n---\n\nreward {completion['reward']}"
            )
            self._writer.add_text(f"completions/{index}", text, step, walltime=now)

    def finish(self, figures: Row) -> None:
        if self._writer is not None:
            self._writer.close()


def run_name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def numbers(values: Row) -> dict[str, float]:
    """Return the finite numbers of a row."""
    return {name: value for name, value in values.items() if isinstance(finite(value), int | float)}


def _cells(completions: Sequence[Row]) -> list[list[Any]]:
    return [[completion.get(column) for column in COMPLETION_COLUMNS] for completion in completions]
