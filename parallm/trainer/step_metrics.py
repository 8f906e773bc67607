"""A step's collection and update -> the numbers that people see."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from parallm.metrics.step import StepMetrics
from parallm.rollout.collector import Collection
from parallm.types import OffPolicyReport, UpdateReport


def step_metrics(
    *,
    step: int,
    collection: Collection,
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
        reward_std=pstdev(rewards) if all(map(math.isfinite, rewards)) else math.nan,
        reward_parts={name: _mean([one.reward_parts.get(name, 0.0) for one in trajectories]) for name in names},
        groups_sampled=len(collection.sampled),
        groups_with_signal=len(collection.with_signal),
        completion_length_mean=fmean(len(one.tokens) for one in trajectories),
        truncated_fraction=fmean(one.finish_reason == "length" for one in trajectories),
        rollout_tokens=collection.num_tokens,
        rollout_seconds=collection.seconds,
        update_seconds=update_seconds,
        total_seconds=total_seconds,
        rollout_tokens_per_second=collection.num_tokens / max(collection.seconds, 1e-9),
        serving_tokens_per_second=served_tokens / max(total_seconds, 1e-9),
        off_policy=off_policy,
        update=update,
    )


def _mean(values: Sequence[float]) -> float:
    """NaN where a score is not finite: `statistics` raises for some of these."""
    return fmean(values) if all(map(math.isfinite, values)) else math.nan
