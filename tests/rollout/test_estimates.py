"""Intervals and estimators against values from elsewhere."""

import itertools
import math
from statistics import fmean

import pytest

from parallm.rollout.estimates import mean_difference, mean_estimate, pass_at, wilson_interval


def test_the_interval_holds_the_share_itself() -> None:
    for trials in range(1, 200):
        assert wilson_interval(trials, trials)[1] == 1.0
        assert wilson_interval(0, trials)[0] == 0.0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775327998628892),
        (10, 10, 0.7224672001371107, 1.0),
        (5, 10, 0.23659309051256395, 0.7634069094874361),
        (1, 1, 0.2065493143772375, 1.0),
        (450, 512, 0.8477906572251377, 0.9043784314848653),
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k: int, correct: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    chances = [any(choice) for choice in itertools.combinations(samples, k)]
    assert pass_at(k, 5, [correct]).mean == pytest.approx(fmean(chances))


def test_pass_at_k_knows_that_all_or_nothing_of_few_problems_is_not_certain() -> None:
    nothing, everything = pass_at(2, 4, [0] * 10), pass_at(2, 4, [4] * 10)
    assert (nothing.low, nothing.high) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert (everything.low, everything.high) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_one_value_has_no_interval() -> None:
    estimate = mean_estimate([3.0])
    assert estimate.mean == 3.0
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_a_difference_is_taken_problem_by_problem() -> None:
    # 1, 0, 1, 0: half of the problems changed, with a standard deviation of 0.5774
    difference = mean_difference([1, 1, 1, 0], [0, 1, 0, 0])
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.5, -0.0658, 1.0658), abs=1e-4)
