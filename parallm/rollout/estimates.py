"""What a sample of problems says about all problems: means with their 95% intervals."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from parallm.reports import Estimate

Z_95 = 1.959964


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson, 1927); never leaves [0, 1].

    For values between 0 and 1 that add up to `successes` it is on the safe side: none vary more than 0 and 1 do.
    """
    share = successes / trials
    centre = share + Z_95**2 / (2 * trials)
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    scale = 1 + Z_95**2 / trials
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return min(share, max(0.0, low)), max(share, min(1.0, high))  # at 0 and 1 rounding would put the share outside


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Mean of values of any size with the interval of the normal distribution, for one value a problem."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    spread = Z_95 * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - spread, mean + spread)


def pass_at(k: int, num_samples: int, num_correct: Sequence[int]) -> Estimate:
    """The chance that at least one of `k` samples is right, `num_correct` of each problem's `num_samples` being so.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of https://arxiv.org/abs/2107.03374, averaged over the problems.
    """
    all_choices = math.comb(num_samples, k)
    chances = [1 - math.comb(num_samples - correct, k) / all_choices for correct in num_correct]
    return Estimate(fmean(chances), *wilson_interval(sum(chances), len(chances)))


def mean_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """How much larger `values` are than `others` of the same problems, pair by pair."""
    return mean_estimate([value - other for value, other in zip(values, others, strict=True)])
