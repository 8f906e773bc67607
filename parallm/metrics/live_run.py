"""A run as those who watch it see it: history, evaluations and status in memory, each change goes out as news.

`RunRecorder` hands over the rows that it writes, `WatchedDisplay` all else that a display gets.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallm.metrics.display import Display, RunHeader
from parallm.metrics.eta import Eta, Schedule
from parallm.metrics.formatting import number, percent
from parallm.metrics.happenings import Happenings
from parallm.metrics.history import History
from parallm.metrics.json_lines import read_rows
from parallm.metrics.news import News
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

COUNTED: Mapping[str, tuple[str, str]] = {
    "guard/rollbacks": ("guard_rollback", "the guard rolled back to the last good weights"),
    "guard/skipped": ("fault", "an update changed nothing because a number was not finite"),
    "faults/total": ("fault", "completions could not be scored"),
}
"""Metrics whose rise is a happening: its kind and its text."""
ENDS = ("finished", "failed")
STATUS_FIELDS = (
    *("state", "step", "total_steps", "version", "message", "loss", "last_update"),
    *("checkpoint_saves", "trajectories_collected"),
)


class LiveRun:
    """One policy in training. On the event loop alone, but for `load`, which comes before all else."""

    def __init__(self, policy: str, news: News, schedule: Schedule | None) -> None:
        self.policy = policy
        self.folder: Path | None = None
        """Folder of its files, once `load` has read them."""
        self.history = History()
        self.evaluations: list[Mapping[str, Any]] = []
        self.eta = Eta(schedule)
        self.status: Callable[[], TrainingStatus] = lambda: TrainingStatus(state="starting")
        """Status of the trainer; replaced as soon as there is one."""
        self.rollouts: RolloutFolder | None = None
        """Completions of its steps; None where none are kept."""
        self.happenings: Happenings | None = None
        """The log of acts and events beside steps; None where none is kept."""
        self._news = news
        self._shown: Mapping[str, Any] = {}
        self._done = (0, 0)  # problems of an evaluation at work

    def load(self, folder: Path) -> None:
        """Read what the run has written before it was interrupted. Raises OSError."""
        self.folder = folder
        for row in read_rows(folder / "metrics.jsonl"):
            self.history.append(row)
        self.evaluations = list(read_rows(folder / "evaluations.jsonl"))

    def note_in(self, happenings: Happenings) -> None:
        """Note what happens here from now on, and tell it; the first row is the start of this process."""
        self.happenings = happenings
        happenings.tell = lambda row: self._news.tell("happening", row, self.policy)
        last = self.history.view().last
        if last is None:
            happenings.add("started", what=self.policy, text="training began")
        else:
            happenings.add("resumed_run", what=self.policy, text=f"training goes on after step {last}", step=last)

    def go_on_after(self, step: int) -> None:
        """Forget later rows, as the files of the run do."""
        self.history.drop_from(step + 1)
        self.evaluations = [row for row in self.evaluations if row["step"] <= step]

    def step(self, row: Mapping[str, Any]) -> None:
        """Take the row of a finished step."""
        before = self.history.last_row
        self.history.append(row)
        self._news.tell("step", row, self.policy)
        for name, (kind, text) in COUNTED.items():
            if isinstance(count := row.get(name), int) and count > before.get(name, 0):
                self._happened(kind, text, row["step"])
        self.tell_status()

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Take the row of an evaluation, in place of an earlier one of the same step."""
        self.evaluations = [one for one in self.evaluations if one["step"] < row["step"]] + [row]
        self._done = (0, 0)
        self._news.tell("evaluation", row, self.policy)
        accuracy, loss = row.get("heldout/accuracy"), row.get("heldout/loss")
        shown = f"held-out accuracy {percent(accuracy)}" if accuracy is not None else f"held-out loss {number(loss)}"
        self._happened("evaluated", f"version {row.get('heldout/version')}: {shown}", row["step"])

    def progress(self, done: int, total: int) -> None:
        """Note how far an evaluation is; the next pulse tells it."""
        self._done = (done, total)

    def tell_status(self) -> None:
        """Tell the status unless nothing but the time left has changed since the last one."""
        row = self.status_row()
        if self._shown and row["checkpoint_saves"] > self._shown["checkpoint_saves"]:
            self._happened("saved", f"a checkpoint after step {row['step']}", row["step"])
        if row["state"] in ENDS and row["state"] != self._shown.get("state"):
            self._happened(row["state"], row["message"] or f"training ended after step {row['step']}", row["step"])
        lasting = {name: value for name, value in row.items() if name not in ("seconds_left", "fraction")}
        is_new = lasting != self._shown or self._done != (0, 0)
        self._shown = lasting
        if is_new:
            self._news.tell("status", row, self.policy)

    def status_row(self) -> dict[str, Any]:
        """Return the status as events and answers have it."""
        status = self.status()
        done, total = self._done
        return {
            "policy": self.policy,
            **{name: getattr(status, name) for name in STATUS_FIELDS},
            "fraction": done / total if total and status.state == "evaluating" else self.eta.fraction,
            "seconds_left": self.eta.seconds,
        }

    def _happened(self, kind: str, text: str, step: int) -> None:
        if self.happenings is not None:
            self.happenings.add(kind, what=self.policy, text=text, step=step)


class WatchedDisplay(Display):
    """Passes all on to another display, and what changes to a `LiveRun`."""

    def __init__(self, inner: Display, run: LiveRun) -> None:
        super().__init__(None)
        self._inner = inner
        self._run = run

    def start(self, header: RunHeader) -> None:
        self._inner.start(header)

    def step(self, metrics: StepMetrics) -> None:
        self._run.eta.step(metrics)
        self._inner.step(metrics)

    def evaluation(self, report: EvaluationReport) -> None:
        self._run.eta.evaluation(report)
        self._inner.evaluation(report)

    def phase(self, status: TrainingStatus) -> None:
        self._run.eta.phase(status)
        self._run.tell_status()
        self._inner.phase(status)

    def progress(self, done: int, total: int) -> None:
        self._run.progress(done, total)
        self._inner.progress(done, total)

    def message(self, text: str) -> None:
        self._inner.message(text)

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        self._inner.finish(rows)

    def close(self) -> None:
        self._inner.close()
