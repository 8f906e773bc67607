"""Values that are not finite in an update, and the trajectories that caused them. The learners call it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parallm.array_row import as_array
from parallm.learner.loss.advantage import MAX_FLOAT32
from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.gradient import TokenStatistics
from parallm.reports import Culprit, FaultKind
from parallm.types import CompletionIndex, Trajectory, TrajectoryGroup

MAX_NAMED = 3
"""Number of trajectories that a message names; the report holds all."""
FAULT_MESSAGES: dict[FaultKind, str] = {
    "reward": "no reward is a number that float32 can hold",
    "behaviour": "a log-prob that the engine sampled with is not finite",
    "advantage": "an advantage is not finite",
    "logprob": "a log-prob of the learner is not finite",
    "loss": "the loss is not finite",
    "gradient": "the gradient is not finite",
    "weights": "the new weights are not finite",
}
"""Messages in the order of cause and effect: the first kind found names the fault."""


class Blame(NamedTuple):
    """A value that is not finite."""

    kind: FaultKind
    completion: int
    """Index among the completions of the step."""
    reason: str


class Faults:
    """The faults of one update. The constructor checks rewards and sampled log-probs, before any forward.

    A completion whose reward float32 cannot hold is dropped, unless none is left.
    """

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._given = groups
        self._culprits: dict[FaultKind, list[Culprit]] = {}
        self.indices: list[CompletionIndex] = []
        """Those of each completion of `groups`, before others were dropped."""
        left_out: list[Culprit] = []
        self.groups: list[TrajectoryGroup] = []
        """The groups without dropped completions."""
        for group_index, group in enumerate(groups):
            reasons = {
                index: reason
                for index, trajectory in enumerate(group.trajectories)
                if (reason := _unusable(trajectory))
            }
            left_out += [self._culprit((group_index, index), reason) for index, reason in reasons.items()]
            kept = [index for index in range(len(group.trajectories)) if index not in reasons]
            self.indices += [(group_index, index) for index in kept]
            if kept:
                trajectories = tuple(group.trajectories[index] for index in kept)
                self.groups.append(replace(group, trajectories=trajectories) if reasons else group)
        self.left_out = tuple(left_out) if self.groups else ()
        """Completions whose reward float32 cannot hold."""
        if left_out and not self.groups:
            self._culprits["reward"] = left_out
        self._check_behaviour()

    @property
    def kind(self) -> FaultKind | None:
        """The first kind in the order of cause and effect; None without a fault."""
        return next((kind for kind in FAULT_MESSAGES if kind in self._culprits), None)

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """The trajectories that caused `kind`."""
        return tuple(self._culprits[self.kind]) if self.kind is not None else ()

    @property
    def message(self) -> str | None:
        """One line that names the fault and the first culprits; None without a fault."""
        if self.kind is None:
            return None
        listed = named_culprits(self.culprits)
        return f"{FAULT_MESSAGES[self.kind]} ({listed})" if listed else FAULT_MESSAGES[self.kind]

    def blame(self, blames: Iterable[Blame]) -> None:
        """Record what `check_passes` has found."""
        for kind, completion, reason in blames:
            self._blame(kind, completion, reason)

    def add(self, kind: FaultKind) -> None:
        """Record a fault that cannot be traced to trajectories."""
        self._culprits.setdefault(kind, [])

    def _blame(self, kind: FaultKind, index: int, reason: str) -> None:
        """`index` counts the completions of the step."""
        self._culprits.setdefault(kind, []).append(self._culprit(self.indices[index], reason))

    def _culprit(self, completion: CompletionIndex, reason: str) -> Culprit:
        group, index = completion
        problem_id = self._given[group].trajectories[index].problem_id
        return Culprit(problem_id=problem_id, group=group, index=index, reason=reason)

    def _check_behaviour(self) -> None:
        trajectories = [trajectory for group in self.groups for trajectory in group.trajectories]
        rows = [as_array(trajectory.logprobs, np.float64) for trajectory in trajectories]
        if not rows or np.isfinite(np.concatenate(rows)).all():
            return  # no step begins before all are checked: the quick way first
        for index, trajectory in enumerate(trajectories):
            logprobs_T = np.where(trajectory.loss_mask, trajectory.logprobs, 0.0)
            if not np.isfinite(logprobs_T).all():
                self._blame("behaviour", index, _first("the sampled log-prob", logprobs_T))


def check_passes(
    batches: Sequence[MicroBatch], statistics: Sequence[TokenStatistics], gradient_norm: float
) -> list[Blame]:
    """Return the values that are not finite in some micro-batches, or in the norm of their summed gradients."""
    pairs = [(batch, np.array(result.logprobs_N)) for batch, result in zip(batches, statistics, strict=True)]
    blames: list[Blame] = []
    for pair, result in zip(pairs, statistics, strict=True):
        blames += _of_tokens(*pair)
        if not math.isfinite(loss := float(result.loss.item())):
            blames += _suspects("loss", [pair], f"in a micro-batch whose loss is {loss}")
    if not math.isfinite(gradient_norm):
        blames += _suspects("gradient", pairs, f"in micro-batches whose gradient norm is {gradient_norm}")
    return blames


def named_culprits(culprits: Sequence[Culprit]) -> str:
    """The first few culprits in one line."""
    named = [f"problem {c.problem_id}, completion {c.index}: {c.reason}" for c in culprits[:MAX_NAMED]]
    more = len(culprits) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _unusable(trajectory: Trajectory) -> str:
    """Why the trajectory cannot be used; empty if it can."""
    if not abs(trajectory.reward) <= MAX_FLOAT32:
        return f"reward {trajectory.reward}"
    if not trajectory.token_advantages:
        return ""
    given = np.asarray(trajectory.token_advantages, np.float64)
    return "" if (np.abs(given) <= MAX_FLOAT32).all() else "its token advantages"


def _of_tokens(batch: MicroBatch, logprobs_N: np.ndarray) -> list[Blame]:
    values: list[tuple[FaultKind, str, np.ndarray]] = [
        ("advantage", "the advantage", batch.advantages_N),
        ("logprob", "the learner's log-prob", logprobs_N),
    ]
    return [
        Blame(kind, index, _first(name, values_T))
        for kind, name, values_N in values
        for index, values_T in _nonfinite_completions(batch, values_N)
    ]


def _suspects(kind: FaultKind, pairs: Sequence[tuple[MicroBatch, np.ndarray]], reason: str) -> list[Blame]:
    """Blame completions with a ratio whose square overflows float32, as in the norm; all if there is none."""
    broken: list[Blame] = []
    for batch, logprobs_N in pairs:
        with np.errstate(over="ignore", invalid="ignore"):
            squares_N = np.exp(2 * (logprobs_N - batch.behaviour_N))
        broken += [
            Blame(kind, index, _first("the squared ratio", values_T))
            for index, values_T in _nonfinite_completions(batch, squares_N)
        ]
    return broken or [Blame(kind, int(index), reason) for batch, _ in pairs for index in batch.completions_S]


def _nonfinite_completions(batch: MicroBatch, values_N: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Index and values of each completion with a trained token whose value is not finite."""
    finite_N = np.isfinite(values_N) | (batch.weights_N == 0)
    if finite_N.all():
        return []
    rows = np.unique(batch.rows_N[~finite_N])
    return [(int(batch.completions_S[row]), values_N[batch.rows_N == row]) for row in rows]


def _first(name: str, values_T: np.ndarray) -> str:
    index = int(np.flatnonzero(~np.isfinite(values_T))[0])
    return f"{name} of token {index} is {values_T[index]}"
