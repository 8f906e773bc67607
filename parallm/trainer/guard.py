"""A step's numbers -> a verdict: go on, skip, roll back, or stop. Pure; `Recovery` acts on it.

The thresholds of divergence come from runs of large models and are wrong for small ones alone: a healthy run of the
embedded model goes from an entropy of 0.06 to 0.03 a token while its reward doubles. So entropy is relative to the
start's, and low entropy, high entropy or missing signal end a run only if the reward has fallen as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from parallm.metrics.step import FlatRow, StepMetrics
from parallm.reports import UpdateReport
from parallm.trainer.settings import GuardSettings
from parallm.types import TrajectoryGroup

Action = Literal["go_on", "skip", "roll_back", "stop"]

PATIENCE = 5
"""Updates in a row that must show a sign before it counts."""
ENTROPY_GROWTH = 3.0
ENTROPY_LEFT = 0.2
"""Share of the entropy at the start above which a low entropy is no collapse."""
REWARD_WINDOW = 10
REWARD_FALL = 0.5
"""Standard deviations of a completion's reward, from the best window to the last; above the noise of a mean."""
SIGNAL_WINDOW = 50
MIN_SIGNAL = 0.02
PARITY_WARNS = 5e-3
PARITY_K3_WARNS = 1e-3
PARITY_STOPS = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A new warning, or a reason to stop."""

    text: str
    stops: bool


@dataclass(slots=True, kw_only=True)
class History:
    """The rules' memory of earlier steps; JSON can hold it."""

    start_entropies: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Mean rewards of the last steps."""
    num_rewards: int = 0
    """Number of steps with rewards in the whole run."""
    deviation: float = 0.0
    """Mean standard deviation of a completion's reward within a step, over the whole run."""
    best_reward: float | None = None
    """The highest mean over a whole window."""
    signal: list[float] = field(default_factory=list)
    """Share of groups with signal in the last steps."""
    streaks: dict[str, int] = field(default_factory=dict)
    """Updates in a row that show a sign, by its name."""
    warned: list[str] = field(default_factory=list)
    """Reported signs that persist."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts over a run; JSON can hold them."""

    skipped: dict[str, int] = field(default_factory=dict)
    """Faulty steps by kind of fault."""
    skipped_in_row: int = 0
    rollbacks: int = 0
    idle: int = 0
    """Steps that had nothing to learn from."""
    idle_in_row: int = 0
    empty: int = 0
    """Completions without a token."""
    unmoved_in_row: int = 0
    """Updates that have moved no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The consequence of a step. `skip` needs no action: the learner has skipped the step already."""

    action: Action
    reason: str = ""
    """The reason; empty if training goes on."""
    warnings: tuple[str, ...] = ()
    """Texts for the log, with any action."""


class Divergence:
    """Watches a run. `compares`: whether engine and learner compute the same (false with dropout)."""

    def __init__(self, settings: GuardSettings, *, compares: bool) -> None:
        self._settings = settings
        self._compares = compares
        self.history = History()
        """Is part of a checkpoint, so that a resumed run judges as if uninterrupted."""

    def observe(self, metrics: StepMetrics) -> list[Sign]:
        """Record one step. Returns new signs, and signs that stop the run."""
        self._remember(metrics)
        fallen, signal = self._reward_has_fallen(), self.history.signal
        share = fmean(signal) if len(signal) == SIGNAL_WINDOW else 1.0
        text = (
            f"over the last {SIGNAL_WINDOW} steps {share:.1%} of the groups had completions with different rewards: "
            "there is hardly anything to learn; choose problems that the model solves sometimes"
        )
        signs = self._sign("signal", share < MIN_SIGNAL, text, fallen)
        if metrics.update is not None and metrics.update.skipped is None:
            signs += self._signs_of_update(metrics.update, fallen)
            signs += self._parity(metrics.update) if self._compares else []
        return signs

    def _remember(self, metrics: StepMetrics) -> None:
        history = self.history
        if math.isfinite(metrics.reward_mean) and math.isfinite(metrics.reward_std):
            history.rewards = [*history.rewards, metrics.reward_mean][-REWARD_WINDOW:]
            history.num_rewards += 1
            history.deviation += (metrics.reward_std - history.deviation) / history.num_rewards
        if len(history.rewards) == REWARD_WINDOW:
            mean = fmean(history.rewards)
            history.best_reward = mean if history.best_reward is None else max(history.best_reward, mean)
        if metrics.groups_sampled:  # a supervised run samples none
            share = metrics.groups_with_signal / metrics.groups_sampled
            history.signal = [*history.signal, share][-SIGNAL_WINDOW:]

    def _signs_of_update(self, update: UpdateReport, fallen: bool) -> list[Sign]:
        history, max_kl = self.history, self._settings.max_kl
        if len(history.start_entropies) < PATIENCE and math.isfinite(update.entropy):
            history.start_entropies = [*history.start_entropies, update.entropy]
        start = fmean(history.start_entropies or [math.nan])
        low = min(self._settings.min_entropy, ENTROPY_LEFT * start)
        entropy = f"the entropy is {update.entropy:.3g} a token, at the start it was {start:.3g}"
        rows = (
            (
                "low entropy",
                update.entropy < low,
                f"{entropy}: completions of a problem are hardly different any more; lower learner.learning_rate or "
                "raise rollout.temperature",
                fallen,
            ),
            (
                "high entropy",
                update.entropy > ENTROPY_GROWTH * start,
                f"{entropy}: the policy loses what it knew; lower learner.learning_rate",
                fallen,
            ),
            (
                "kl",
                update.kl_to_behaviour > max_kl,
                f"the KL to the policy that sampled is {update.kl_to_behaviour:.3g} a token (k3), above "
                f"trainer.guard.max_kl={max_kl:g} for {PATIENCE} updates: what is trained on is too far from what was "
                "sampled; lower learner.learning_rate or how old samples may be",
                True,
            ),
        )
        return [
            sign
            for name, is_there, text, stops in rows
            for sign in self._sign(name, self._lasts(name, is_there), text, stops)
        ]

    def _parity(self, update: UpdateReport) -> list[Sign]:
        parity, k3 = update.parity, update.kl_to_behaviour
        mean = parity.mean_abs if parity.num_tokens else 0.0
        is_fresh = parity.num_tokens == update.num_tokens  # older samples differ by the updates since
        return self._sign(
            "parity",
            mean > PARITY_WARNS or (is_fresh and k3 > PARITY_K3_WARNS),
            f"log-probs of engine and learner differ by {mean:.3g} on average (k3 {k3:.3g}): they should compute the "
            f"same; above {PARITY_STOPS:g} training stops. Try model.dtype=float32",
            stops=mean > PARITY_STOPS,
        )

    def _lasts(self, name: str, is_there: bool) -> bool:
        streaks = self.history.streaks
        streaks[name] = streaks.get(name, 0) + 1 if is_there else 0
        return streaks[name] >= PATIENCE

    def _sign(self, name: str, is_there: bool, text: str, stops: bool) -> list[Sign]:
        """The sign if it is there and new, or stops the run."""
        warned = self.history.warned
        if not is_there:
            self.history.warned = [other for other in warned if other != name]
            return []
        stops = stops and self._settings.on_divergence == "stop"
        if name in warned and not stops:
            return []
        self.history.warned = [*warned, name]
        return [Sign(text=text, stops=stops)]

    def _reward_has_fallen(self) -> bool:
        history = self.history
        if history.best_reward is None:
            return False
        return history.best_reward - fmean(history.rewards) > REWARD_FALL * history.deviation


class Guard:
    """Counts faults over a run and decides. A fault is a step with a value that is not finite. A step whose rewards are
    all not finite is skipped and counts as no fault of the policy.

    `trainer.guard.max_skips` faults without a good update between them cause a roll-back. After
    `trainer.guard.max_rollbacks` roll-backs training stops, because the newest update is not to blame.
    """

    def __init__(self, settings: GuardSettings, *, compares: bool) -> None:
        self._settings = settings
        self._divergence = Divergence(settings, compares=compares)
        self._counts = Counts()

    def judge(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> Verdict:
        """Judge one step with all of its sampled groups. Called once a step, in order."""
        # signs of divergence are in samples and their rewards
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
        counts = self._counts
        kinds = {f"guard/skipped_{kind}": count for kind, count in sorted(counts.skipped.items())}
        return {
            "guard/skipped": sum(counts.skipped.values()),
            "guard/rollbacks": counts.rollbacks,
            "guard/idle": counts.idle,
            "guard/empty_completions": counts.empty,
            **kinds,
        }

    def counters(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return {**asdict(self._counts), "divergence": asdict(self._divergence.history)}

    def resume(self, counters: Mapping[str, Any]) -> None:
        self._divergence.history = History(**counters["divergence"])
        self._counts = Counts(**{name: value for name, value in counters.items() if name != "divergence"})

    def _after(self, update: UpdateReport | None) -> tuple[Action, str]:
        counts = self._counts
        if update is None or update.fault is None:
            if update is not None and update.skipped is None:
                counts.skipped_in_row = 0
            return "go_on", ""
        counts.skipped[update.fault] = counts.skipped.get(update.fault, 0) + 1
        reason = f"nothing was changed: {update.skipped}"
        if update.fault == "reward":
            return "skip", reason
        counts.skipped_in_row += 1
        if counts.skipped_in_row < self._settings.max_skips:
            return "skip", reason
        in_row = f"{counts.skipped_in_row} steps in a row changed nothing, the last one because {update.skipped}"
        if counts.rollbacks >= self._settings.max_rollbacks:
            return "stop", (
                f"{in_row}; {counts.rollbacks} roll-backs have not helped. The trajectories to blame are in the run's "
                "folder under faults; check the environment's score or learner.data, then learner.learning_rate and "
                "model.dtype"
            )
        counts.skipped_in_row = 0
        counts.rollbacks += 1
        return "roll_back", in_row

    def _empty_completions(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        empty = [t.problem_id for group in groups for t in group.trajectories if not t.tokens]
        self._counts.empty += len(empty)
        return [f"{len(empty)} completions have no token, the first one of problem {empty[0]}"] if empty else []

    def _idle_step(self, update: UpdateReport | None) -> list[str]:
        if update is not None and (update.skipped is None or update.fault is not None):
            self._counts.idle_in_row = 0
            return []
        self._counts.idle += 1
        self._counts.idle_in_row += 1
        if self._counts.idle_in_row > 1:
            return []  # each step's line shows it
        why = "every completion of a problem got the same reward" if update is None else update.skipped
        return [f"nothing was trained: {why}"]

    def _unmoved(self, update: UpdateReport | None) -> list[str]:
        if update is None or update.skipped is not None:
            return []
        self._counts.unmoved_in_row = 0 if update.has_moved else self._counts.unmoved_in_row + 1
        if self._counts.unmoved_in_row != 1:
            return []  # each step's line shows it
        why = "" if update.learning_rate == 0 else ", since its step is too small for float32 beside the weights"
        return [
            f"the update has moved no weight at learner.learning_rate={update.learning_rate:g}{why}: no new version"
        ]
