"""A step's numbers -> a verdict: go on, skip, roll back, or stop. Pure; `Recovery` acts on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parallm.metrics.step import FlatRow, StepMetrics
from parallm.reports import UpdateReport
from parallm.trainer.divergence import Divergence
from parallm.trainer.settings import GuardSettings
from parallm.types import TrajectoryGroup

Action = Literal["go_on", "skip", "roll_back", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The consequence of a step. `skip` needs no action: the learner has skipped the step already."""

    action: Action
    reason: str = ""
    """The reason; empty if training goes on."""
    warnings: tuple[str, ...] = ()
    """Texts for the log, with any action."""


class Guard:
    """Counts faults over a run and decides. A fault is a step with a value that is not finite. A step whose rewards are
    all not finite is skipped and counts as no fault of the policy.

    `trainer.guard.max_skips` faults without a good update between them cause a roll-back. After
    `trainer.guard.max_rollbacks` roll-backs training stops, because the newest update is not to blame.
    """

    def __init__(self, settings: GuardSettings, *, compares: bool) -> None:
        self._settings = settings
        self._divergence = Divergence(settings, compares=compares)
        self._skipped: Counter[str] = Counter()  # by kind of fault
        self._skipped_in_row = 0
        self._rollbacks = 0
        self._idle = 0  # steps that had nothing to learn from
        self._idle_in_row = 0
        self._empty = 0  # completions without a token
        self._unmoved_in_row = 0  # updates that have moved no weight

    def judge(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> Verdict:
        """Judge one step with all of its sampled groups. Called once a step, in order."""
        # the rules of divergence are about samples and their rewards
        signs = [] if metrics.is_supervised else self._divergence.observe(metrics)
        warnings = [*self._empty_completions(groups), *self._idle_step(metrics.update), *self._unmoved(metrics.update)]
        warnings += [sign.text for sign in signs if not sign.stops]
        fatal = next((sign.text for sign in signs if sign.stops), None)
        action, reason = self._after(metrics.update)
        if fatal is not None:
            action, reason = "stop", f"training diverges: {fatal}"
        return Verdict(action=action, reason=reason, warnings=tuple(warnings))

    def row(self) -> FlatRow:
        """Counts of the run so far by metric name, without kinds of faults that never occurred."""
        kinds = {f"guard/skipped_{kind}": count for kind, count in sorted(self._skipped.items())}
        return {
            "guard/skipped": self._skipped.total(),
            "guard/rollbacks": self._rollbacks,
            "guard/idle": self._idle,
            "guard/empty_completions": self._empty,
            **kinds,
        }

    def counters(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return {
            "skipped": dict(self._skipped),
            "skipped_in_row": self._skipped_in_row,
            "rollbacks": self._rollbacks,
            "idle": self._idle,
            "idle_in_row": self._idle_in_row,
            "empty": self._empty,
            "unmoved_in_row": self._unmoved_in_row,
            "divergence": self._divergence.counters(),
        }

    def resume(self, counters: Mapping[str, Any]) -> None:
        self._skipped = Counter(counters["skipped"])
        self._skipped_in_row = counters["skipped_in_row"]
        self._rollbacks = counters["rollbacks"]
        self._idle = counters["idle"]
        self._idle_in_row = counters["idle_in_row"]
        self._empty = counters["empty"]
        self._unmoved_in_row = counters.get("unmoved_in_row", 0)
        self._divergence.resume(counters["divergence"])

    def _after(self, update: UpdateReport | None) -> tuple[Action, str]:
        if update is None or update.fault is None:
            if update is not None and update.skipped is None:
                self._skipped_in_row = 0
            return "go_on", ""
        self._skipped[update.fault] += 1
        reason = f"nothing was changed: {update.skipped}"
        if update.fault == "reward":
            return "skip", reason
        self._skipped_in_row += 1
        if self._skipped_in_row < self._settings.max_skips:
            return "skip", reason
        in_row = f"{self._skipped_in_row} steps in a row changed nothing, the last one because {update.skipped}"
        if self._rollbacks >= self._settings.max_rollbacks:
            return "stop", (
                f"{in_row}; {self._rollbacks} roll-backs have not helped. The trajectories to blame are in the "
                "run's folder under faults; check the environment's score or learner.data, then learner.learning_rate "
                "and model.dtype"
            )
        self._skipped_in_row = 0
        self._rollbacks += 1
        return "roll_back", in_row

    def _empty_completions(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        empty = [t.problem_id for group in groups for t in group.trajectories if not t.tokens]
        self._empty += len(empty)
        return [f"{len(empty)} completions have no token, the first one of problem {empty[0]}"] if empty else []

    def _idle_step(self, update: UpdateReport | None) -> list[str]:
        if update is not None and (update.skipped is None or update.fault is not None):
            self._idle_in_row = 0
            return []
        self._idle += 1
        self._idle_in_row += 1
        if self._idle_in_row > 1:
            return []  # each step's line shows it
        why = "every completion of a problem got the same reward" if update is None else update.skipped
        return [f"nothing was trained: {why}"]

    def _unmoved(self, update: UpdateReport | None) -> list[str]:
        if update is None or update.skipped is not None:
            return []
        self._unmoved_in_row = 0 if update.has_moved else self._unmoved_in_row + 1
        if self._unmoved_in_row != 1:
            return []  # each step's line shows it
        why = "" if update.learning_rate == 0 else ", since its step is too small for float32 beside the weights"
        return [
            f"the update has moved no weight at learner.learning_rate={update.learning_rate:g}{why}: no new version"
        ]
