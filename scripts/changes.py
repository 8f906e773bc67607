"""By how much a mean has changed, with the 95% interval of chance: for runs that learn and for those that must not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

Z_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The interval is the normal one, for two samples of hundreds of values that have nothing in common."""

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
    """The interval is NaN where there are fewer than two values on a side."""
    means = fmean(before), fmean(after)
    spread = math.nan
    if min(len(before), len(after)) > 1:
        spread = Z_95 * math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    gain = means[1] - means[0]
    return Change(before=means[0], after=means[1], low=gain - spread, high=gain + spread)


def change_by_halves(values: Sequence[float]) -> Change:
    """From the first half of a run to its second half."""
    middle = len(values) // 2
    return change(values[:middle], values[middle:])
