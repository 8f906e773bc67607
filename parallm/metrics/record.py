"""The files that a run leaves in its folder: metrics, evaluations and samples as lines of JSON, a summary, curves,
and what trackers get of them."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallm.metrics.curves import draw_curves
from parallm.metrics.json_lines import JsonLines, read_rows, to_json, write_whole
from parallm.metrics.live_run import LiveRun
from parallm.metrics.machine import describe_commit, describe_machine, peak_memory_gb
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.metrics.summary import RunSummary
from parallm.metrics.trackers import Trackers
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
        self._trackers: Trackers | None = None
        self.live: LiveRun | None = None
        """The run as its watchers see it."""

    def start(self) -> None:
        """Begin what is seen elsewhere; not earlier, since a start that fails should leave nothing."""
        self._trackers = Trackers(self.folder, self._settings, self._config)

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
        completions = [timed(sample_row(metrics.step, group, one), row) for group, one in samples]
        self._samples.append(*completions)
        if self.live is not None:
            self.live.step(row)
        if self._trackers is not None:
            self._trackers.log(row, completions)

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
        if self._trackers is not None:
            self._trackers.log(row)

    def finish(self, prefix: str, *, title: str = "", device: str = "") -> RunSummary:
        """Write summary.json, draw curves.png if it is set, and close the trackers; call it however the run ends.

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
        if self._settings.curves:
            self._draw(summary, title or prefix)
        if self._trackers is not None:
            self._trackers.finish(figures)
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
    """Return one completion for people, and for `learner=sft learner.data=RUN`.

    `prompt` has the contents alone, `messages` the roles, too. `num_trained_tokens` is below `num_tokens` if
    `completion` holds tokens that the policy does not learn, such as an environment's replies.
    """
    messages = group.problem.messages
    return {
        "step": step,
        "problem_id": trajectory.problem_id,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "prompt": "\n".join(message.content for message in messages),
        "completion": trajectory.text,
        "answer": group.problem.answer,
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "version": trajectory.weight_versions[-1].version if trajectory.weight_versions else None,
        "finish_reason": trajectory.finish_reason,
        "num_tokens": len(trajectory.tokens),
        "num_trained_tokens": trajectory.loss_mask.count(True),
    }
