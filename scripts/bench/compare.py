"""Comparisons: sides that take turns, the settings with which a peer is fastest, and tables for people."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles, variance
from typing import Any, TypeVar

Result = TypeVar("Result")
Settings = Mapping[str, Any]
Z_95 = 1.96


def in_turns(rounds: int, sides: Mapping[str, Callable[[int], Result]]) -> dict[str, list[Result]]:
    """The results of each side, called with the number of the round: a busy machine slows both sides of a round."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            results[name].append(side(number))
            print(f"  round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    return results


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one over the other."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def print_table(title: str, rows: Sequence[Sequence[object]]) -> None:
    """Print rows of cells in aligned columns; floats with four digits."""
    texts = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(f"\n{title}")
    for row in texts:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


# tuning --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    settings: Settings
    seconds: float | None
    """None: it does not run with these settings."""


def tune(
    start: Settings, choices: Mapping[str, Sequence[Any]], seconds_of: Callable[[Settings], float | None]
) -> list[Trial]:
    """Try `start`, then each value of each setting in turn beside the best of the others.

    Returns the trials, fastest first; those that do not run come last. `seconds_of` is called once for each.
    """

    def attempt(settings: Settings) -> Trial:
        seconds = seconds_of(settings)
        result = "does not run" if seconds is None else f"{seconds:.4g} s"
        print(f"  {described(settings)}: {result}", file=sys.stderr, flush=True)
        return Trial(settings=settings, seconds=seconds)

    def ranked() -> list[Trial]:
        return sorted(trials, key=lambda trial: (trial.seconds is None, trial.seconds or 0.0))

    trials = [attempt(start)]
    for name, values in choices.items():
        best = ranked()[0].settings
        for value in values:
            settings = {**best, name: value}
            if all(trial.settings != settings for trial in trials):
                trials.append(attempt(settings))
    return ranked()


def described(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "no settings"


# chance --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """By how much a mean has changed, with the normal 95% interval of chance for two samples of hundreds of values."""

    before: float
    after: float
    low: float
    high: float

    @property
    def gain(self) -> float:
        return self.after - self.before

    def text(self) -> str:
        return f"{self.gain:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    """The interval is NaN where a side has fewer than two values."""
    spread = math.nan
    if min(len(before), len(after)) > 1:
        spread = Z_95 * math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    means = fmean(before), fmean(after)
    gain = means[1] - means[0]
    return Change(before=means[0], after=means[1], low=gain - spread, high=gain + spread)


def change_by_halves(values: Sequence[float]) -> Change:
    """From the first half of a run to its second half."""
    middle = len(values) // 2
    return change(values[:middle], values[middle:])
