"""Intervals and estimators against values from elsewhere; how often intervals hold the truth, in simulation."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest

from parallm.rollout.confidence_intervals import (
    mean_estimate,
    mean_intervals,
    paired_interval,
    pass_at,
    share_difference,
    share_estimate,
    support,
)


@pytest.mark.parametrize(
    ("right", "num", "low", "high"),
    [
        (0, 4, 0.0, 0.6023646356164746),
        (1, 4, 0.006309463209709816, 0.8058795503167565),
        (0, 10, 0.0, 0.30849710781876083),
        (10, 10, 0.6915028921812392, 1.0),
        (5, 10, 0.1870860284474045, 0.8129139715525955),
        (450, 512, 0.8474646, 0.9058828),
        (1, 1319, 0.0000192, 0.0042168),
    ],
)
def test_the_interval_of_a_share_is_clopper_and_pearsons_up_to_half_a_percent(
    right: int, num: int, low: float, high: float
) -> None:
    found = share_estimate(right, num)
    tolerance = 0.005 * (high - low)
    assert (found.low, found.high) == pytest.approx((low, high), abs=tolerance)
    assert found.low <= found.mean <= found.high


@pytest.mark.parametrize("num", [1, 7, 512, 1319])
def test_the_interval_holds_the_share_itself_where_all_or_none_are_right(num: int) -> None:
    assert share_estimate(num, num).high == 1.0
    assert share_estimate(0, num).low == 0.0


@pytest.mark.parametrize("num", [2, 9, 40])
def test_bounds_of_means_are_quantiles_of_randomly_weighted_means(num: int) -> None:
    generator = np.random.default_rng(num)
    values = generator.beta(0.5, 0.8, num)
    weights = generator.exponential(size=(400_000, num + 1))
    expected = np.quantile((weights @ np.append(values, 1.0)) / weights.sum(axis=1), 0.975)
    assert mean_estimate(list(values)).high == pytest.approx(expected, abs=0.004)


def test_means_that_vary_less_have_narrower_intervals() -> None:
    steady, spread = mean_estimate([0.4, 0.6] * 64), mean_estimate([0.0, 1.0] * 64)
    assert steady.mean == spread.mean == 0.5
    assert steady.high - steady.low < 0.35 * (spread.high - spread.low)


def test_equal_values_do_not_claim_certainty() -> None:
    estimate = mean_estimate([0.5] * 8)
    assert estimate.low < 0.35 < 0.65 < estimate.high
    assert share_difference([True] * 8, [True] * 8).high > 0.3
    assert share_difference([False] * 8, [False] * 8).low < -0.3


def test_values_outside_of_the_range_show_that_their_bound_is_unknown() -> None:
    assert support([0.0, 0.5, 1.0]) == (0.0, 1.0)
    assert support([0.0, 1.0, 2.0, 4.0, 3.0]) == (0.0, 5.0)  # five values from 0 to 4, 1 apart on average
    assert support([-1.0, 1.0, 0.0]) == (-2.0, 1.0)
    assert support([7.0, 8.0], low=5.0, high=9.0) == (5.0, 9.0)


def test_one_value_says_little_about_the_mean() -> None:
    estimate = mean_estimate([3.0])
    assert estimate.mean == 3.0
    assert estimate.low < 0.2
    assert estimate.high > 5.8


def test_samples_are_estimated_side_by_side_as_they_are_alone() -> None:
    values_RN = np.array([[0.0, 0.2, 1.0], [0.4, 0.4, 0.4], [-1.0, 0.0, 3.0]])
    lows_R, highs_R = mean_intervals(values_RN)
    alone = [mean_estimate(list(row)) for row in values_RN]
    assert list(lows_R) == pytest.approx([one.low for one in alone])
    assert list(highs_R) == pytest.approx([one.high for one in alone])


def test_a_difference_that_cannot_be_told_from_noise_holds_zero() -> None:
    gained = share_difference([True, True, True, False], [False, True, False, False])
    assert gained.mean == 0.5
    assert gained.low < 0 < gained.high <= 1


def test_differences_stay_between_minus_one_and_one_and_turn_with_their_sign() -> None:
    assert paired_interval(0, 5, 0, 0)[1] == 1.0
    assert paired_interval(0, 0, 5, 0) == pytest.approx(tuple(-bound for bound in paired_interval(0, 5, 0, 0)[::-1]))


def test_a_difference_is_narrower_the_more_the_answers_agree() -> None:
    agree, differ = paired_interval(40, 5, 5, 50), paired_interval(20, 25, 25, 30)
    assert agree[1] - agree[0] < 0.6 * (differ[1] - differ[0])


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k: int, correct: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    chances = [any(choice) for choice in itertools.combinations(samples, k)]
    assert pass_at(k, 5, [correct]).mean == pytest.approx(fmean(chances))


def test_pass_at_k_knows_that_all_or_nothing_of_few_problems_is_not_certain() -> None:
    nothing, everything = pass_at(2, 4, [0] * 10), pass_at(2, 4, [4] * 10)
    assert (nothing.low, nothing.high) == pytest.approx((0.0, 0.3085), abs=2e-3)
    assert (everything.low, everything.high) == pytest.approx((0.6915, 1.0), abs=2e-3)


@pytest.mark.parametrize("chance", [0.0, 0.01, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("num", [4, 17, 184, 1319])
def test_shares_hold_the_truth_in_95_of_100_samples(num: int, chance: float) -> None:
    """All outcomes with their chances, but for those more than six standard deviations off."""
    far = 6 * math.sqrt(num * chance * (1 - chance)) + 6
    held = 0.0
    for right in range(max(0, math.floor(num * chance - far)), min(num, math.ceil(num * chance + far)) + 1):
        estimate = share_estimate(right, num)
        if estimate.low <= chance <= estimate.high:
            held += binomial(right, num, chance)
    assert held >= 0.95


def binomial(right: int, num: int, chance: float) -> float:
    if chance in (0.0, 1.0):
        return float(right == num * chance)
    ways = math.lgamma(num + 1) - math.lgamma(right + 1) - math.lgamma(num - right + 1)
    return math.exp(ways + right * math.log(chance) + (num - right) * math.log(1 - chance))
