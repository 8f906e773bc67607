"""Figures of an update as totals over its micro-batches. Those of several workers are merged. The learners call it.

Axes: N completion tokens of a micro-batch.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.gradient import TokenStatistics
from parallm.reports import ParityReport, RatioReport


@dataclass(slots=True)
class Spread:
    """Count, sum and bounds of numbers. NaN among them makes sum and bounds NaN."""

    count: int = 0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values_N: np.ndarray) -> None:
        if len(values_N):
            total, bounds = values_N.sum(dtype=np.float64), (values_N.min(), values_N.max())
            self.merge(Spread(len(values_N), float(total), *map(float, bounds)))

    def merge(self, more: "Spread") -> None:
        self.count += more.count
        self.total += more.total
        self.smallest = float(np.minimum(self.smallest, more.smallest))  # unlike min, it returns NaN if one is
        self.largest = float(np.maximum(self.largest, more.largest))

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass(slots=True)
class UpdateTotals:
    """Sums over micro-batches of one update."""

    loss: float = 0.0
    kl: float = 0.0
    kl_to_base: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    tokens: int = 0
    bit_equal: int = 0
    """Tokens that parity compares and whose log-probs are equal."""
    differences: Spread = field(default_factory=Spread)
    """Absolute differences of log-probs at tokens that parity compares."""
    ratios: Spread = field(default_factory=Spread)
    """Ratios of the other tokens."""

    def add(self, batch: MicroBatch, statistics: TokenStatistics, version: int) -> None:
        """`version`: that of the learner. Tokens that it has sampled are compared."""
        logprobs_N = np.array(statistics.logprobs_N)
        trained_N = batch.weights_N > 0
        comparable_N = trained_N & (batch.versions_N == version)
        self.loss += float(statistics.loss.item())
        self.kl += _sum(np.array(statistics.kl_N)[trained_N])
        self.kl_to_base += _sum(np.array(statistics.kl_to_base_N)[trained_N])
        self.entropy += _sum(np.array(statistics.entropies_N)[trained_N])
        self.clipped += _sum(np.array(statistics.clipped_N))
        self.tokens += int(trained_N.sum())
        differences_N = np.abs(logprobs_N - batch.behaviour_N)[comparable_N]
        self.bit_equal += int((differences_N == 0).sum())
        self.differences.add(differences_N)
        with np.errstate(over="ignore", invalid="ignore"):  # the report shows values that are not finite
            self.ratios.add(np.exp((logprobs_N - batch.behaviour_N)[trained_N & ~comparable_N]))

    def merge(self, more: "UpdateTotals") -> None:
        for name in ("loss", "kl", "kl_to_base", "entropy", "clipped", "tokens", "bit_equal"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        self.differences.merge(more.differences)
        self.ratios.merge(more.ratios)

    def parity(self) -> ParityReport:
        if not self.differences.count:
            return ParityReport()
        return ParityReport(
            num_tokens=self.differences.count,
            bit_equal_fraction=self.bit_equal / self.differences.count,
            mean_abs=self.differences.mean,
            max_abs=self.differences.largest,
        )

    def ratio(self) -> RatioReport:
        if not self.ratios.count:
            return RatioReport()
        return RatioReport(
            num_tokens=self.ratios.count,
            mean=self.ratios.mean,
            smallest=self.ratios.smallest,
            largest=self.ratios.largest,
        )


def _sum(values_N: np.ndarray) -> float:
    return float(values_N.sum())
