"""The printed 95% intervals hold the truth in 95 of 100 samples, and are not much wider than the usual ones.

Shares of right answers, exactly; differences between the shares of two models on the same problems, exactly for few and
by samples for many; means of rewards by samples, with bounds that are known and with bounds that are not. Widths are
over those of Wilson's interval for shares and Newcombe's for pairs. The control, the normal interval, must miss. Apart
from them: one model solves what another does, and a few problems more, for which no interval of 1.3 times Newcombe's
width holds 93% of the time.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pytest
from bench.measurement import request_of_tests

from parallm.rollout.confidence_intervals import mean_intervals, paired_interval, share_estimate

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]
Chances = tuple[float, float, float, float]
Table = tuple[int, int, int, int]
"""How often both models, only the first, only the second, and neither were right."""
Z_95 = 1.959964
NUMBERS = (4, 5, 6, 8, 12, 16, 17, 24, 32, 64, 128, 256, 512, 1319)
FEW_NUMBERS = (4, 8, 17, 64)
CHANCES = (0.0, 0.01, 0.05, 0.5, 1.0)
RARE = 1e-9
"""Outcomes of a smaller chance are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The intervals of samples of one distribution."""

    coverage: float
    width: float | None
    """Over that of the usual interval; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The worst cases of all."""

    worst: float
    width_ratio: float
    one_way: float
    control: float


def test_intervals_hold_the_truth_and_the_normal_one_does_not() -> None:
    found = coverage(FEW_NUMBERS, 1_500)
    assert found.worst >= 0.93
    assert found.width_ratio <= 1.3
    assert found.one_way >= 0.91
    assert found.control < 0.5


@pytest.mark.robustness
def test_all_intervals_hold_the_truth(record_property: Callable[[str, object], None]) -> None:
    found = coverage(FEW_NUMBERS, 1_500) if request_of_tests().is_quick else coverage(NUMBERS, 10_000)
    record_property("intervals.worst_coverage", found.worst)
    record_property("intervals.worst_width_ratio", found.width_ratio)
    record_property("intervals.one_way_coverage", found.one_way)
    record_property("intervals.control_coverage", found.control)
    assert found.worst >= 0.93


def coverage(numbers: Sequence[int], draws: int) -> Coverage:
    """Samples of these sizes; `draws` of them where there are many outcomes."""
    cases = [*shares(numbers, our_share), *pairs(numbers, paired_interval, draws), *rewards(numbers, draws)]
    controls = [*shares(numbers, normal_share), *pairs(numbers, normal_pair, draws)]
    return Coverage(
        worst=min(case.coverage for case in cases),
        width_ratio=max(case.width for case in cases if case.width is not None),
        one_way=min(case.coverage for case in few_more(numbers, draws)),
        control=min(case.coverage for case in controls),
    )


def shares(numbers: Sequence[int], interval: Callable[[int, int], Interval]) -> Iterator[Case]:
    """Shares of right answers."""
    for num, chance in itertools.product(numbers, CHANCES):
        outcomes = [(right, weight) for right in range(num + 1) if (weight := binomial(right, num, chance)) > RARE]
        found = [(weight, interval(right, num), wilson(right, num)) for right, weight in outcomes]
        yield case_of(chance, found)


def pairs(numbers: Sequence[int], interval: Callable[[int, int, int, int], Interval], draws: int) -> Iterator[Case]:
    """Differences of shares of two models, whose answers depend on each other little, much or as much as they can."""
    for num, chances in itertools.product(numbers, paired_chances()):
        yield pair_case(chances, num, interval, draws)


def few_more(numbers: Sequence[int], draws: int) -> Iterator[Case]:
    """Differences where one model solves what the other does and, of n problems, some more on average."""
    for num, first, more in itertools.product(numbers, (0.2, 0.5, 0.8, 1.0), (1, 2, 2.5, 3, 4, 6)):
        if (gain := more / num) <= first:
            chances = (first - gain, gain, 0.0, 1 - first)
            yield pair_case(chances, num, paired_interval, draws)


def pair_case(chances: Chances, num: int, interval: Callable[[int, int, int, int], Interval], draws: int) -> Case:
    outcomes = tables(np.array(chances), num, draws)
    found = [(weight, interval(*table), newcombe(*table)) for table, weight in outcomes]
    return case_of(chances[1] - chances[2], found)


def rewards(numbers: Sequence[int], draws: int) -> Iterator[Case]:
    """Means of rewards between 0 and 1, and of others, whose bounds the interval is not told."""
    generator = np.random.default_rng(1)
    for num, chance in itertools.product(numbers, CHANCES):
        for draw in bounded(chance).values():
            values_RN = draw(generator, (samples_of(num, draws), num))
            yield reward_case(chance, values_RN)
    for num, (mean, draw) in itertools.product(numbers, unbounded().values()):
        values_RN = draw(generator, (samples_of(num, draws), num))
        yield reward_case(mean, values_RN, is_compared=False)


def reward_case(mean: float, values_RN: Floats, *, is_compared: bool = True) -> Case:
    lows_R, highs_R = mean_intervals(values_RN)
    num = values_RN.shape[1]
    found = [
        (1 / len(values_RN), (float(low), float(high)), wilson(float(total), num) if is_compared else (0.0, 0.0))
        for low, high, total in zip(lows_R, highs_R, values_RN.sum(axis=1), strict=True)
    ]
    return case_of(mean, found, is_compared=is_compared)


def case_of(truth: float, found: Sequence[tuple[float, Interval, Interval]], *, is_compared: bool = True) -> Case:
    """`found` are the chance of a sample, our interval of it, and the usual one."""
    held = sum(weight for weight, (low, high), _ in found if low - 1e-9 <= truth <= high + 1e-9)
    width = sum(weight * (high - low) for weight, (low, high), _ in found)
    usual = sum(weight * (high - low) for weight, _, (low, high) in found)
    return Case(
        coverage=held / sum(weight for weight, *_ in found),
        width=width / usual if is_compared else None,
    )


def paired_chances() -> list[Chances]:
    """Chances of a table for all pairs of `CHANCES`, `shared` of the way from independence to the most agreement."""
    found: list[Chances] = []
    for second, first in itertools.combinations_with_replacement(CHANCES, 2):
        can_agree = second > 0 and first < 1
        for shared in (0.0, 0.5, 0.9, 1.0) if can_agree else (0.0,):
            both = (1 - shared) * first * second + shared * second
            found.append((both, first - both, second - both, 1 - first - second + both))
    return found


def tables(chances: Floats, num: int, draws: int) -> list[tuple[Table, float]]:
    """Tables with their chances: all of them where there are few, else samples."""
    if num <= 12:
        every, logarithms = all_tables(num)
        weights = np.exp(logarithms + (every * np.log(np.maximum(chances, 1e-300))).sum(axis=1))
    else:
        sampled = np.random.default_rng(num).multinomial(num, np.maximum(chances, 0) / chances.sum(), size=draws)
        every, counts = np.unique(sampled, axis=0, return_counts=True)
        weights = counts / draws
    rows = [(tuple(map(int, row)), float(weight)) for row, weight in zip(every, weights, strict=True) if weight > RARE]
    return [((a, b, c, d), weight) for (a, b, c, d), weight in rows]


@lru_cache
def all_tables(num: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """All tables of `num` problems, and the logarithms of the numbers of ways to them."""
    every = np.array([(a, b, c, num - a - b - c) for a, b, c in itertools.product(range(num + 1), repeat=3)])
    every = every[every[:, 3] >= 0]
    return every, np.array([math.lgamma(num + 1) - sum(math.lgamma(count + 1) for count in row) for row in every])


def bounded(mean: float) -> dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]]:
    """Distributions on [0, 1] with this mean."""
    if mean in (0.0, 1.0):
        return {"always": lambda _, shape: np.full(shape, mean)}
    return {
        "always": lambda _, shape: np.full(shape, mean),
        "spread": lambda generator, shape: generator.beta(5 * mean, 5 * (1 - mean), shape),
        "nearly 0 or 1": lambda generator, shape: generator.beta(mean / 4, (1 - mean) / 4, shape),
        "0, half or 1": lambda generator, shape: generator.binomial(2, mean, shape) / 2,
    }


def unbounded() -> dict[str, tuple[float, Callable[[np.random.Generator, tuple[int, int]], Floats]]]:
    """Distributions beyond [0, 1] with their means."""

    def of(values: Sequence[float], weights: Sequence[float]) -> tuple[float, Callable[..., Floats]]:
        return float(np.dot(values, weights)), lambda generator, shape: generator.choice(values, shape, p=weights)

    return {
        "0 or 2, 5%": of((0, 2), (0.95, 0.05)),
        "0 or 2, half": of((0, 2), (0.5, 0.5)),
        "-1 or 1, 5%": of((-1, 1), (0.95, 0.05)),
        "-1 or 1, half": of((-1, 1), (0.5, 0.5)),
        "0, 0.1, 1 or 1.1": of((0, 0.1, 1, 1.1), (0.3, 0.3, 0.1, 0.3)),
        "uniform from 0 to 10": (5.0, lambda generator, shape: generator.uniform(0, 10, shape)),
        "normal around 0": (0.0, lambda generator, shape: generator.normal(0, 1, shape)),
        "normal around 3": (3.0, lambda generator, shape: generator.normal(3, 1, shape)),
    }


def our_share(right: int, num: int) -> Interval:
    estimate = share_estimate(right, num)
    return estimate.low, estimate.high


def wilson(right: float, num: int) -> Interval:
    share = right / num
    centre = (share + Z_95**2 / (2 * num)) / (1 + Z_95**2 / num)
    spread = Z_95 * math.sqrt(max(0.0, share * (1 - share)) / num + Z_95**2 / (4 * num**2)) / (1 + Z_95**2 / num)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Method 10 of Newcombe (1998), with his correction of the correlation."""
    num = both + only_first + only_second + neither
    sums = (both + only_first, only_second + neither, both + only_second, only_first + neither)
    excess: float = both * neither - only_first * only_second
    if excess > 0:
        excess = max(0.0, excess - num / 2)
    correlation = excess / math.sqrt(math.prod(sums)) if all(sums) else 0.0
    first, second = (both + only_first) / num, (both + only_second) / num
    (low, high), (other_low, other_high) = wilson(both + only_first, num), wilson(both + only_second, num)
    root = partial(square_and_add, correlation)
    below, above = root(first - low, other_high - second), root(high - first, second - other_low)
    return max(-1.0, first - second - below), min(1.0, first - second + above)


def square_and_add(correlation: float, one: float, other: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))


def normal(values: Sequence[float]) -> Interval:
    mean = fmean(values)
    spread = Z_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - spread, mean + spread


def normal_share(right: int, num: int) -> Interval:
    return normal([1.0] * right + [0.0] * (num - right))


def normal_pair(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    return normal([1.0] * only_first + [-1.0] * only_second + [0.0] * (both + neither))


def binomial(right: int, num: int, chance: float) -> float:
    if chance in (0.0, 1.0):
        return float(right == num * chance)
    ways = math.lgamma(num + 1) - math.lgamma(right + 1) - math.lgamma(num - right + 1)
    return math.exp(ways + right * math.log(chance) + (num - right) * math.log(1 - chance))


def samples_of(num: int, draws: int) -> int:
    """Samples of `num` values: the shorter they are, the more of them."""
    return max(1_000, 30 * draws // num)
