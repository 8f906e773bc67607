"""A step's groups and update -> its row in metrics.jsonl. The trainers call it."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from parallm.metrics.step import StepMetrics
from parallm.reports import OffPolicyReport, UpdateReport
from parallm.rollout.collector import RolloutBatch
from parallm.types import Trajectory, TrajectoryGroup

ON_POLICY = OffPolicyReport(lag_mean=0.0, lag_max=0, dropped=0)


def step_metrics(
    *,
    step: int,
    rollout_batch: RolloutBatch,
    off_policy: OffPolicyReport = ON_POLICY,
    update: UpdateReport | None,
    update_seconds: float,
    total_seconds: float,
    served_tokens: int,
) -> StepMetrics:
    """Rewards and lengths are from the first draw, because replacements are chosen by their rewards."""
    trajectories = [trajectory for group in rollout_batch.first for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    return StepMetrics(
        step=step,
        reward_mean=_mean(rewards),
        reward_std=_std(rewards),
        reward_parts=_reward_parts(trajectories),
        groups_sampled=len(rollout_batch.sampled),
        groups_with_signal=len(rollout_batch.with_signal),
        environments=environment_metrics(rollout_batch.first),
        faults=rollout_batch.faults,
        problems_skipped=rollout_batch.problems_skipped,
        completion_length_mean=_mean([len(trajectory.tokens) for trajectory in trajectories]),
        truncated_fraction=_mean([trajectory.finish_reason == "length" for trajectory in trajectories]),
        rollout_tokens=rollout_batch.num_tokens,
        rollout_seconds=rollout_batch.seconds,
        update_seconds=update_seconds,
        total_seconds=total_seconds,
        rollout_tokens_per_second=rollout_batch.num_tokens / max(rollout_batch.seconds, 1e-9),
        serving_tokens_per_second=served_tokens / max(total_seconds, 1e-9),
        off_policy=off_policy,
        update=update,
    )


def environment_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean reward, reward parts and share of completions for each of several mixed environments."""
    by_environment: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_environment.setdefault(group.problem.environment, []).extend(group.trajectories)
    total = sum(map(len, by_environment.values()))
    row: dict[str, float] = {}
    for environment in sorted(by_environment.keys() - {""}):
        own = by_environment[environment]
        row[f"{environment}/share"] = len(own) / max(1, total)
        row[f"{environment}/reward"] = _mean([trajectory.reward for trajectory in own])
        row |= {f"{environment}/{part}": mean for part, mean in _reward_parts(own).items()}
    return row


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each part; 0 counts where a trajectory does not have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_parts})
    return {name: _mean([trajectory.reward_parts.get(name, 0.0) for trajectory in trajectories]) for name in names}


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN for no values and for values that are not finite (`statistics` raises for some)."""
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def _std(values: Sequence[float]) -> float:
    """The population's standard deviation, exactly 0 for equal values; NaN as for `_mean`."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    return float(np.std(values)) if min(values) < max(values) else 0.0
