"""A step's collection and update -> the numbers that people see."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from parallm.metrics.step import StepMetrics
from parallm.reports import OffPolicyReport, UpdateReport
from parallm.rollout.collector import RolloutBatch
from parallm.types import Trajectory, TrajectoryGroup


def step_metrics(
    *,
    step: int,
    collection: RolloutBatch,
    off_policy: OffPolicyReport,
    update: UpdateReport | None,
    update_seconds: float,
    total_seconds: float,
    served_tokens: int,
) -> StepMetrics:
    """Rewards and lengths are those of the first draw: replacements are chosen by their rewards."""
    trajectories = [one for group in collection.first for one in group.trajectories]
    rewards = [one.reward for one in trajectories]
    names = sorted({name for one in trajectories for name in one.reward_parts})
    return StepMetrics(
        step=step,
        reward_mean=_mean(rewards),
        reward_std=pstdev(rewards) if rewards and all(map(math.isfinite, rewards)) else math.nan,
        reward_parts={name: _mean([one.reward_parts.get(name, 0.0) for one in trajectories]) for name in names},
        groups_sampled=len(collection.sampled),
        groups_with_signal=len(collection.with_signal),
        environments=environment_metrics(collection.first),
        faults=collection.faults,
        problems_skipped=collection.problems_skipped,
        completion_length_mean=_mean([len(one.tokens) for one in trajectories]),
        truncated_fraction=_mean([one.finish_reason == "length" for one in trajectories]),
        rollout_tokens=collection.num_tokens,
        rollout_seconds=collection.seconds,
        update_seconds=update_seconds,
        total_seconds=total_seconds,
        rollout_tokens_per_second=collection.num_tokens / max(collection.seconds, 1e-9),
        serving_tokens_per_second=served_tokens / max(total_seconds, 1e-9),
        off_policy=off_policy,
        update=update,
    )


def environment_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """For each of several mixed environments its mean reward and parts, and its share of the completions."""
    own: dict[str, list[Trajectory]] = {}
    for group in groups:
        own.setdefault(group.problem.environment, []).extend(group.trajectories)
    total = sum(map(len, own.values()))
    row: dict[str, float] = {}
    for environment in sorted(own.keys() - {""}):
        found = own[environment]
        row[f"{environment}/share"] = len(found) / max(1, total)
        row[f"{environment}/reward"] = _mean([one.reward for one in found])
        for part in sorted({part for one in found for part in one.reward_parts}):
            row[f"{environment}/{part}"] = _mean([one.reward_parts.get(part, 0.0) for one in found])
    return row


def _mean(values: Sequence[float]) -> float:
    """NaN of nothing, and where a score is not finite: `statistics` raises for some of these."""
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan
