"""The files that a run leaves in its folder: metrics, evaluations and samples as lines of JSON, a summary, curves,
wandb."""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallm.metrics.curves import draw_curves
from parallm.metrics.json_lines import JsonLines, finite, read_rows, to_json, write_whole
from parallm.metrics.live_run import LiveRun
from parallm.metrics.machine import describe_commit, describe_machine, peak_memory_gb
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.metrics.summary import RunSummary
from parallm.reports import EvaluatedCompletion, EvaluationReport
from parallm.types import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


class RunRecorder:
    """Writes each step when it is reported, so that a killed run has lost nothing but the step it was in.

    What an interrupted run has written of steps that come again is dropped, so that no step stands twice in a file and
    none is counted that was lost: by `go_on_after`, else when the first step is reported.
    """

    def __init__(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._settings = settings
        self._steps = JsonLines(folder / "metrics.jsonl")
        self._evaluations = JsonLines(folder / "evaluations.jsonl")
        self._samples = JsonLines(folder / "samples.jsonl")
        self._evaluated = JsonLines(folder / "evaluation_samples.jsonl")
        self._files = (self._steps, self._samples, self._evaluations, self._evaluated)
        self._goes_on_after: int | None = None
        self._config = config
        self._wandb: WandbRun | None = None
        self.live: LiveRun | None = None
        """What those who watch the run see of it."""

    def start(self) -> None:
        """Begin what is seen elsewhere; not earlier, since a start that fails should leave nothing."""
        if self._settings.wandb != "off":
            self._wandb = WandbRun(self.folder, self._settings, self._config)

    def go_on_after(self, step: int) -> None:
        """The run goes on after `step`: drop what the files hold of later ones, unless that was done already."""
        if self._goes_on_after is None:
            self._goes_on_after = step
            for lines in self._files:
                lines.drop_from(step + 1)
            if self.live is not None:
                self.live.go_on_after(step)

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None:
        """Record one step and `samples_per_step` of its completions, from as many problems as possible."""
        self.go_on_after(metrics.step - 1)
        row = timed(metrics.to_flat())
        self._steps.append(row)
        samples = pick_samples(groups, self._settings.samples_per_step)
        self._samples.append(*(timed(sample_row(metrics.step, group, one), row) for group, one in samples))
        if self.live is not None:
            self.live.step(row)
        if self._wandb is not None:
            self._wandb.log(row)

    def evaluation(self, report: EvaluationReport, completions: Sequence[EvaluatedCompletion] = ()) -> None:
        """Record one evaluation and `samples_per_evaluation` of its completions, the first ones; one of the same step,
        left by an interrupted run, is replaced."""
        self._evaluations.drop_from(report.step)
        self._evaluated.drop_from(report.step)
        row = timed(evaluation_row(report))
        self._evaluations.append(row)
        kept = completions[: self._settings.samples_per_evaluation]
        self._evaluated.append(*({"step": report.step, "version": report.version, **asdict(one)} for one in kept))
        if self.live is not None:
            self.live.evaluation(row)
        if self._wandb is not None:
            self._wandb.log(row)

    def finish(self, prefix: str, *, title: str = "", device: str = "") -> RunSummary:
        """Write summary.json and curves.png and close wandb; call it however the run ends.

        Figures are named `{prefix}.{name}`. `title` stands above the curves, else the prefix. The resident memory of
        this process counts, which leaves out what a GPU holds.
        """
        for lines in self._files:
            lines.flush()
            if lines.num_unwritten:
                logger.warning("%d rows of %s could not be written to the end", lines.num_unwritten, lines.file)
        summary = RunSummary(
            folder=self.folder,
            steps=read_rows(self._steps.file),
            evaluations=read_rows(self._evaluations.file),
            peak_memory_gb=peak_memory_gb(),
        )
        figures = summary.figures(prefix)
        self._write_summary(summary, figures, device)
        self._draw(summary, title or prefix)
        if self._wandb is not None:
            self._wandb.finish(figures)
        return summary

    def _draw(self, summary: RunSummary, title: str) -> None:
        try:
            draw_curves(summary.steps, summary.evaluations, file=self.folder / "curves.png", title=title)
        except (OSError, ImportError, RuntimeError, ValueError) as error:
            logger.warning("cannot draw %s: %s", self.folder / "curves.png", error)

    def _write_summary(self, summary: RunSummary, figures: Mapping[str, float | None], device: str) -> None:
        content = {
            "figures": figures,
            "machine": describe_machine(device),
            "commit": describe_commit(),
            "first_step": summary.steps[0] if summary.steps else None,
            "last_step": summary.steps[-1] if summary.steps else None,
            "evaluations": summary.evaluations,
        }
        try:
            write_whole(self.folder / "summary.json", to_json(content, indent=2) + "\n")
        except OSError as error:
            logger.warning("cannot write %s: %s", self.folder / "summary.json", error)


class WandbRun:
    """Mirrors rows to Weights & Biases. Whatever goes wrong there is reported once and costs the run nothing.

    A resumed run folder continues the same wandb run, by the id in `wandb_id.txt`.
    """

    def __init__(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> None:
        self._run: Any = None  # None before the start and after a failure
        self._try("start", lambda: self._start(folder, settings, config))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of `row`, which holds a `step`."""
        if self._run is not None:
            self._try("log", lambda: self._run.log(_numbers(row)))

    def finish(self, figures: Mapping[str, float | None]) -> None:
        """Send the figures of the whole run and close it."""
        if self._run is not None:
            self._try("finish", lambda: (self._run.summary.update(_numbers(figures)), self._run.finish()))
            self._run = None

    def _start(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - optional, and takes seconds to import

        id_file = folder / "wandb_id.txt"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run = wandb.init(
            project=settings.wandb_project,
            name=f"{folder.parent.name}/{folder.name}",
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

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a reporting service raises must not end the run
            logger.warning("wandb failed to %s and is off from here on: %s: %s", what, type(error).__name__, error)
            self._run = None


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if finite(value) is not None}


def timed(row: Mapping[str, Any], like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row with the Unix seconds at which it is written, or those of another row, after its step."""
    now = round(time.time(), 3) if like is None else like["time"]
    return {"step": row["step"], "time": now, **row}


def pick_samples(groups: Sequence[TrajectoryGroup], count: int) -> list[tuple[TrajectoryGroup, Trajectory]]:
    """Return up to `count` trajectories: the first of each group, then the second of each, and so on."""
    longest = max((len(group.trajectories) for group in groups), default=0)
    turns = ((group, turn) for turn in range(longest) for group in groups if turn < len(group.trajectories))
    return [(group, group.trajectories[turn]) for (group, turn), _ in zip(turns, range(count), strict=False)]


def sample_row(step: int, group: TrajectoryGroup, trajectory: Trajectory) -> dict[str, Any]:
    """Return what a person wants to read of one completion."""
    return {
        "step": step,
        "problem_id": trajectory.problem_id,
        "prompt": "\n".join(message.content for message in group.problem.messages),
        "completion": trajectory.text,
        "answer": group.problem.answer,
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "version": trajectory.weight_versions[-1].version if trajectory.weight_versions else None,
        "finish_reason": trajectory.finish_reason,
        "num_tokens": len(trajectory.tokens),
    }
