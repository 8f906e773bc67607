"""Whether a run has learned anything, in one sentence, from the rewards of its steps."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

from parallm.metrics.wording import number, percent

Row = Mapping[str, Any]
LEAST_STEPS = 6
SURE = 2.0
"""Standard errors of the slope that make a trend: what noise alone shows in one run of forty, rising."""
LITTLE_SIGNAL = 0.1


def no_rise(steps: Sequence[Row]) -> str | None:
    """Return a text for a run whose reward has not risen beyond its noise, and what to try.

    None for one that has risen, that is too short to tell, that has no rewards, or that was not to learn.
    """
    rewards = [float(row["reward/mean"]) for row in steps if isinstance(row.get("reward/mean"), int | float)]
    has_moved = any((row.get("update/adapter_delta_norm") or 0) > 0 for row in steps)
    trend = _trend(rewards) if len(rewards) >= LEAST_STEPS else math.inf
    if trend >= SURE or not has_moved:
        return None
    third = len(rewards) // 3
    first, last = number(fmean(rewards[:third])), number(fmean(rewards[-third:]))
    what = "fallen" if trend <= -SURE else "not risen beyond its noise"
    thirds = f"{first} in the first third, {last} in the last"
    return f"the reward has {what} in {len(rewards)} steps ({thirds}): {_advice(steps)}"


def _trend(rewards: Sequence[float]) -> float:
    """Slope over the steps, in its standard errors; 0 where all are equal."""
    places = range(len(rewards))
    slope, intercept = linear_regression(places, rewards)
    squares = sum((reward - intercept - slope * place) ** 2 for place, reward in zip(places, rewards, strict=True))
    spread = sum((place - fmean(places)) ** 2 for place in places)
    error = math.sqrt(squares / (len(rewards) - 2) / spread)
    return slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0


def _advice(steps: Sequence[Row]) -> str:
    sampled = sum(row.get("groups/sampled") or 0 for row in steps)
    with_signal = sum(row.get("groups/with_signal") or 0 for row in steps)
    if sampled and with_signal < LITTLE_SIGNAL * sampled:
        return (
            f"{percent(with_signal / sampled)} of the groups had completions with different rewards; choose problems "
            "that the model solves sometimes, or raise rollout.group_size or rollout.temperature"
        )
    return "read samples.jsonl, and try more steps, a higher learner.learning_rate, or more problems a step"
