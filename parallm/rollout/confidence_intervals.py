"""Means over held-out problems with 95% intervals that hold for few problems as well. Pure.

Used by evaluations and by comparisons of models. Axes: R samples, N values of a sample.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np
import numpy.typing as npt

from parallm.reports import Estimate

Floats = npt.NDArray[np.float64]
Z_95 = 1.959964
NUM_HALVINGS = 32
DOUBTED = 0.75
"""Problems that `paired_interval` adds: the largest number that widens no interval beyond 1.3 times Newcombe's."""


def mean_estimate(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Return the mean of one value per problem, each from `low` to `high`; see `support` for values outside."""
    lows_R, highs_R = mean_intervals(np.array([values], np.float64), low, high)
    return Estimate(fmean(values), float(lows_R[0]), float(highs_R[0]))


def share_estimate(num_right: int, num: int) -> Estimate:
    """Return a share with the interval of Clopper and Pearson (1934), up to half a percent of its width.

    Wilson's is narrower and holds less often: 84% of the time for 17 problems of which the model solves 1%.
    """
    return Estimate(num_right / num, *_share_interval(num_right, num))


def share_difference(right: Sequence[bool], others: Sequence[bool]) -> Estimate:
    """Return the difference of two models' shares of right answers to the same problems."""
    pairs = list(zip(right, others, strict=True))
    table = [pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
    return Estimate((table[1] - table[2]) / len(pairs), *paired_interval(*table))


def pass_at(k: int, num_samples: int, num_correct: Sequence[int]) -> Estimate:
    """Return the chance that one of `k` samples is right, from the number of right ones among each problem's samples.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of https://arxiv.org/abs/2107.03374, averaged over the problems.
    """
    all_choices = math.comb(num_samples, k)
    return mean_estimate([1 - math.comb(num_samples - correct, k) / all_choices for correct in num_correct])


def support(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Return the range that `values` come from: `low` to `high`, unless a value lies outside.

    The bound on that side is unknown then; it is assumed to lie beyond the values by the mean gap between N values.
    """
    lows_R, highs_R = _supports(np.array([values], np.float64), low, high)
    return float(lows_R[0]), float(highs_R[0])


def mean_intervals(values_RN: Floats, low: float = 0.0, high: float = 1.0) -> tuple[Floats, Floats]:
    """Return bounds (R,) of the means of the distributions that the samples `values_RN` come from.

    Gaffke's bounds (2005; https://arxiv.org/abs/1905.06208): the 2.5% and 97.5% quantiles of the mean of the values
    and the bound of their range, weighted at random by a flat Dirichlet distribution. Their coverage is conjectured
    for all distributions within the range, and measured by tests/rollout/test_interval_coverage.py.
    """
    lows_R, highs_R = _supports(values_RN, low, high)
    return -_upper_bounds(-values_RN, -lows_R), _upper_bounds(values_RN, highs_R)


def paired_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return bounds of the difference between two models' shares of right answers, from how often each was right.

    Newcombe's square-and-add interval for paired shares (1998, method 10), made of `share_estimate`'s intervals, and
    with DOUBTED more of each kind of problem that only one model solves in place of his correction of a positive
    correlation. Where one model solves all that the other does, and two or three of many problems more, it holds 91%
    of the time, and Newcombe's 86%: an interval that holds 93% there is 1.36 times as wide as his at least.
    """
    num = both + only_first + only_second + neither
    first, second = share_estimate(both + only_first, num), share_estimate(both + only_second, num)
    correlation = _correlation(both, only_first, only_second, neither)
    if correlation > 0:
        correlation = max(0.0, _correlation(both, only_first + DOUBTED, only_second + DOUBTED, neither))
    difference = first.mean - second.mean
    below = _added(first.mean - first.low, second.high - second.mean, correlation)
    above = _added(first.high - first.mean, second.mean - second.low, correlation)
    return max(-1.0, difference - below), min(1.0, difference + above)


@lru_cache(maxsize=4096)
def _share_interval(num_right: int, num: int) -> tuple[float, float]:
    estimate = mean_estimate([1.0] * num_right + [0.0] * (num - num_right))
    return estimate.low, estimate.high


def _correlation(both: int, only_first: float, only_second: float, neither: int) -> float:
    """Return the correlation of two models' right answers; 0 if one of them is always or never right."""
    product = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    return (both * neither - only_first * only_second) / math.sqrt(product) if product else 0.0


def _added(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))


def _supports(values_RN: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    smallest_R, largest_R = values_RN.min(axis=1), values_RN.max(axis=1)
    gap_R = (np.maximum(largest_R, high) - np.minimum(smallest_R, low)) / max(1, values_RN.shape[1] - 1)
    return (
        np.where(smallest_R < low, smallest_R - gap_R, low),
        np.where(largest_R > high, largest_R + gap_R, high),
    )


def _upper_bounds(values_RN: Floats, highs_R: Floats) -> Floats:
    """Return 97.5% quantiles (R,) of the randomly weighted mean of each sample's values and its bound in `highs_R`.

    A weighted mean is above m as often as a sum of exponentials times (value - m) is above 0. For that chance there is
    a saddlepoint approximation, Barndorff-Nielsen's r* (1986), which is compared with the normal quantile. Each tilt
    of the weights belongs to one m, and the greater the tilt, the smaller the chance: the tilt is found by halving.
    """
    lows_R = values_RN.min(axis=1)
    scales_R = highs_R - lows_R
    means_R, below_R, above_R = (np.full(len(values_RN), start) for start in (0.5, 0.0, 1.0))
    with np.errstate(all="ignore"):  # where all values are the bound, nothing varies
        scaled_RN = np.column_stack([(values_RN - lows_R[:, None]) / scales_R[:, None], np.ones(len(values_RN))])
        for _ in range(NUM_HALVINGS):
            tilts_R = (below_R + above_R) / 2
            left_RN = 1 - tilts_R[:, None] * scaled_RN
            means_R = (scaled_RN / left_RN).sum(axis=1) / (1 / left_RN).sum(axis=1)
            is_too_small_R = ~(_r_star(scaled_RN - means_R[:, None], left_RN, tilts_R, means_R) > Z_95)
            below_R = np.where(is_too_small_R, tilts_R, below_R)
            above_R = np.where(is_too_small_R, above_R, tilts_R)
    return np.where(scales_R > 0, lows_R + scales_R * means_R, highs_R)


def _r_star(distances_RN: Floats, left_RN: Floats, tilts_R: Floats, means_R: Floats) -> Floats:
    """Return how many standard deviations 0 lies above a sum of exponentials times `distances_RN`; NaN if undefined."""
    num = distances_RN.shape[1]
    roots_R = np.sqrt(2 * (np.log(left_RN).sum(axis=1) - num * np.log(1 - tilts_R * means_R)))
    slopes_R = tilts_R * np.sqrt(((distances_RN / left_RN) ** 2).sum(axis=1))
    r_star_R: Floats = roots_R + np.log(slopes_R / roots_R) / roots_R
    return r_star_R
