"""What is not finite in an update, and which trajectories are to blame. Found per micro-batch, a few passes over N."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parallm.learner.loss.advantage import MAX_FLOAT32
from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.gradient import TokenStatistics
from parallm.reports import Culprit, FaultKind
from parallm.types import Trajectory, TrajectoryGroup

MAX_NAMED = 3
"""Trajectories that a message names; the report holds all."""
FAULT_MESSAGES: dict[FaultKind, str] = {
    "reward": "no reward is a number that float32 can hold",
    "behaviour": "a log-prob that the engine sampled with is not finite",
    "advantage": "an advantage is not finite",
    "logprob": "a log-prob of the learner is not finite",
    "loss": "the loss is not finite",
    "gradient": "the gradient is not finite",
    "weights": "the new weights are not finite",
}
"""In the order of cause and effect: the first kind that is found names the fault."""


class Faults:
    """The faults of one update. Rewards and sampled log-probs are looked at when it is made, before any forward.

    A reward that float32 cannot hold is no fault of the policy: its completion is left out, unless no other is left.
    """

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._found: dict[FaultKind, list[Culprit]] = {}
        self._completions: list[Culprit] = []
        left_out: list[Culprit] = []
        self.groups: list[TrajectoryGroup] = []
        """The groups without the completions that are left out."""
        for place, group in enumerate(groups):
            named = [
                Culprit(problem_id=one.problem_id, group=place, index=index, reason=_reason(one))
                for index, one in enumerate(group.trajectories)
            ]
            left_out += [one for one in named if one.reason]
            kept = [one for one in named if not one.reason]
            self._completions += kept
            if kept:
                trajectories = tuple(group.trajectories[one.index] for one in kept)
                self.groups.append(replace(group, trajectories=trajectories) if len(kept) < len(named) else group)
        self.left_out = tuple(left_out) if self.groups else ()
        """Completions whose reward float32 cannot hold."""
        if left_out and not self.groups:
            self._found["reward"] = left_out
        for place, one in enumerate(one for group in self.groups for one in group.trajectories):
            logprobs_T = np.where(one.loss_mask, one.logprobs, 0.0)
            if not np.isfinite(logprobs_T).all():
                self._blame("behaviour", place, _first("the sampled log-prob", logprobs_T))

    @property
    def kind(self) -> FaultKind | None:
        """The first kind in the order of cause and effect; None while everything was finite."""
        return next((kind for kind in FAULT_MESSAGES if kind in self._found), None)

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """Those of `kind`."""
        return tuple(self._found[self.kind]) if self.kind is not None else ()

    @property
    def message(self) -> str | None:
        """One line that names the fault and the first culprits; None without a fault."""
        if self.kind is None:
            return None
        listed = named_culprits(self.culprits)
        return f"{FAULT_MESSAGES[self.kind]} ({listed})" if listed else FAULT_MESSAGES[self.kind]

    def check_passes(
        self, batches: Sequence[MicroBatch], statistics: Sequence[TokenStatistics], gradient_norm: float
    ) -> None:
        """Look at some micro-batches and at the norm of the sum of their gradients."""
        pairs = [(batch, np.array(found.logprobs_N)) for batch, found in zip(batches, statistics, strict=True)]
        for pair, found in zip(pairs, statistics, strict=True):
            self._look_at_tokens(*pair)
            if not math.isfinite(loss := float(found.loss.item())):
                self._suspect("loss", [pair], f"in a micro-batch whose loss is {loss}")
        if not math.isfinite(gradient_norm):
            self._suspect("gradient", pairs, f"in micro-batches whose gradient norm is {gradient_norm}")

    def add(self, kind: FaultKind) -> None:
        """A fault that cannot be traced to trajectories."""
        self._found.setdefault(kind, [])

    def _look_at_tokens(self, batch: MicroBatch, logprobs_N: np.ndarray) -> None:
        for place, row_T in _broken_rows(batch, batch.advantages_N):
            self._blame("advantage", place, _first("the advantage", row_T))
        for place, row_T in _broken_rows(batch, logprobs_N):
            self._blame("logprob", place, _first("the learner's log-prob", row_T))

    def _suspect(self, kind: FaultKind, pairs: Sequence[tuple[MicroBatch, np.ndarray]], reason: str) -> None:
        """Blame the rows with a ratio whose square float32 cannot hold, as in the norm; all rows if there is none."""
        broken: list[tuple[int, str]] = []
        for batch, logprobs_N in pairs:
            with np.errstate(over="ignore", invalid="ignore"):
                squares_N = np.exp(2 * (logprobs_N - batch.behaviour_N))
            broken += [(place, _first("the squared ratio", row_T)) for place, row_T in _broken_rows(batch, squares_N)]
        every = [(int(place), reason) for batch, _ in pairs for place in batch.completions_S]
        for place, why in broken or every:
            self._blame(kind, place, why)

    def _blame(self, kind: FaultKind, place: int, reason: str) -> None:
        """`place` counts the completions of the step."""
        self._found.setdefault(kind, []).append(replace(self._completions[place], reason=reason))


def named_culprits(culprits: Sequence[Culprit]) -> str:
    """The first few in a line."""
    named = [f"problem {one.problem_id}, completion {one.index}: {one.reason}" for one in culprits[:MAX_NAMED]]
    more = len(culprits) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _reason(trajectory: Trajectory) -> str:
    """Why it cannot be compared with others; empty if it can."""
    if not abs(trajectory.reward) <= MAX_FLOAT32:
        return f"reward {trajectory.reward}"
    given = np.asarray(trajectory.token_advantages or (), np.float64)
    return "" if (np.abs(given) <= MAX_FLOAT32).all() else "its token advantages"


def _broken_rows(batch: MicroBatch, values_N: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The place of each completion with a trained token whose value is not finite, and all values of the completion."""
    finite_N = np.isfinite(values_N) | (batch.weights_N == 0)
    if finite_N.all():
        return []
    rows = np.unique(batch.rows_N[~finite_N])
    return [(int(batch.completions_S[row]), values_N[batch.rows_N == row]) for row in rows]


def _first(name: str, values_T: np.ndarray) -> str:
    place = int(np.flatnonzero(~np.isfinite(values_T))[0])
    return f"{name} of token {place} is {values_T[place]}"
