"""Weights & Biases, when asked. Whatever goes wrong there is reported once and costs the run nothing."""

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from parallm.metrics.json_lines import finite

logger = logging.getLogger(__name__)


class WandbRun:
    """Mirrors rows to wandb. A resumed run folder continues the same wandb run, by the id in `wandb_id.txt`."""

    def __init__(
        self, folder: Path, *, mode: Literal["online", "offline"], project: str, config: Mapping[str, Any]
    ) -> None:
        self._run: Any = None  # None before the start and after a failure
        self._try("start", lambda: self._start(folder, mode=mode, project=project, config=config))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of `row`, which holds a `step`."""
        if self._run is not None:
            numbers = {name: value for name, value in row.items() if finite(value) is not None}
            self._try("log", lambda: self._run.log(numbers))

    def finish(self, figures: Mapping[str, float | None]) -> None:
        """Send the figures of the whole run and close it."""
        if self._run is not None:
            self._try("finish", lambda: self._finish(figures))
            self._run = None

    def _start(
        self, folder: Path, *, mode: Literal["online", "offline"], project: str, config: Mapping[str, Any]
    ) -> None:
        import wandb  # noqa: PLC0415 - optional, and takes seconds to import

        id_file = folder / "wandb_id.txt"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run = wandb.init(
            project=project,
            name=f"{folder.parent.name}/{folder.name}",
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=dict(config),
            # its capture of the console would fight with the live display
            settings=wandb.Settings(console="off", silent=True, init_timeout=30, finish_timeout=60),
        )
        # a resumed run logs steps again that were lost with the process, which wandb's own counter refuses
        self._run.define_metric("*", step_metric="step")

    def _finish(self, figures: Mapping[str, float | None]) -> None:
        self._run.summary.update({name: value for name, value in figures.items() if finite(value) is not None})
        self._run.finish()

    def _try(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a reporting service raises must not end the run
            logger.warning("wandb failed to %s and is off from here on: %s: %s", what, type(error).__name__, error)
            self._run = None
