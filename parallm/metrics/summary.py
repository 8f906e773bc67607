"""A whole run in a few numbers, computed from what is on disk, so that a resumed run counts from its beginning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from parallm.metrics.formatting import FILES, MISSING, accuracy, duration, number, percent, short_path

MetricsRow = Mapping[str, Any]
NUM_LAST = 3
"""`reward_last` is the mean over this many steps, since a single step's reward is noisy."""
MIN_STEPS = 6
"""Steps of a run that is long enough for a trend."""
SURE = 2.0
"""Standard errors of the slope that make a trend: noise alone shows that in one run of forty, rising."""
LITTLE_SIGNAL = 0.1
"""Share of groups with signal below which the problems are to blame."""


def accuracy_text(row: MetricsRow) -> str:
    """Return accuracy, interval, problems and step of an evaluation."""
    text = accuracy(row.get("heldout/accuracy"), row.get("heldout/low"), row.get("heldout/high"))
    unit = "pairs" if "heldout/margin" in row else "problems"
    return f"{text}, {row.get('heldout/problems')} {unit}, step {row['step']}"


def loss_text(row: MetricsRow) -> str:
    """Return loss, number of demonstrations and step of an evaluation."""
    num = row.get("heldout/demonstrations")
    of = f", {num} demonstrations" if num else ""
    return f"{number(row.get('heldout/loss'))}{of}, step {row['step']}"


def margin_text(row: MetricsRow) -> str:
    """Return the margin of an evaluation of a reward model with its interval."""
    low, high = number(row.get("heldout/margin_low")), number(row.get("heldout/margin_high"))
    return f"{number(row.get('heldout/margin'))} ({low} to {high})"


SAMPLED = {"reward": "reward/mean"}
SUPERVISED = {"loss": "update/loss", "training_accuracy": "update/accuracy", "training_margin": "update/margin"}
"""Measures of steps by the names of their figures."""
HELD_OUT = {
    "heldout/loss": ("heldout_loss", "held-out loss", loss_text),
    "heldout/accuracy": ("accuracy", "held-out accuracy", accuracy_text),
    "heldout/margin": ("heldout_margin", "held-out margin", margin_text),
}
"""Measures of evaluations: the names of their figures, those for people, and how they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Rows of metrics.jsonl and evaluations.jsonl in order of steps, and what is known at the end."""

    folder: Path
    steps: Sequence[MetricsRow]
    evaluations: Sequence[MetricsRow]
    peak_memory_gb: float | None

    def figures(self, prefix: str) -> dict[str, float | None]:
        """Return `{prefix}.{name}` for each figure of this kind of run; null where a number is missing."""
        return {f"{prefix}.{name}": value for name, value in self._figures().items()}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that ends a run: name and value."""
        figures, best = self._figures(), self.best
        progress = "loss" if self.is_supervised else "reward"
        rows = [
            (f"{name} {when}", MISSING if row is None else show(row))
            for column, (_, name, show) in HELD_OUT.items()
            if self._has(column)
            for when, row in (("before", self.before), ("after", self.after))
        ]
        if rows:
            rows.append(("best version", MISSING if best is None else best_text(best)))
        rows += [
            (f"{progress}, first step", number(figures[f"{progress}_first"])),
            (f"{progress}, last {min(NUM_LAST, len(self.steps))} steps", number(figures[f"{progress}_last"])),
            ("training time", f"{duration(figures['train_seconds'])} in {len(self.steps)} steps"),
        ]
        memory = MISSING if self.peak_memory_gb is None else f"{self.peak_memory_gb:.2f} GB"
        if self.is_supervised:
            return [*rows, ("peak memory", memory), (FILES, short_path(self.folder))]
        return [
            *rows,
            ("rollout tokens/s", number(figures["rollout_tokens_per_second"])),
            ("peak memory", memory),
            ("learner and engine log-probs", parity_text(figures)),
            (FILES, short_path(self.folder)),
        ]

    @property
    def is_supervised(self) -> bool:
        """Trained on given completions or pairs: nothing was sampled."""
        return bool(self.steps) and "reward/mean" not in self.steps[0]

    @property
    def before(self) -> MetricsRow | None:
        """The evaluation before the first step; None if the run began without one."""
        first_step = self.steps[0]["step"] if self.steps else math.inf
        return self.evaluations[0] if self.evaluations and self.evaluations[0]["step"] < first_step else None

    @property
    def after(self) -> MetricsRow | None:
        """The last evaluation, unless it is the one before the first step."""
        return self.evaluations[-1] if self.evaluations and self.evaluations[-1] is not self.before else None

    @property
    def best(self) -> MetricsRow | None:
        """The evaluation with the highest accuracy, the newest of equal ones; without accuracies, the lowest loss."""
        scored = [row for row in self.evaluations if score_of(row) is not None]
        return max(reversed(scored), key=lambda row: score_of(row) or 0.0, default=None)

    def _figures(self) -> dict[str, float | None]:
        """Return the figures by name. `train_seconds` is the time inside of steps, without evaluations and start."""
        steps, named = self.steps, SUPERVISED if self.is_supervised else SAMPLED
        figures: dict[str, float | None] = {"steps": len(steps)}
        for name, column in named.items():
            if name == "reward" or column in steps[0]:
                figures[f"{name}_first"] = mean(numbers(steps[:1], column))
                figures[f"{name}_last"] = mean(numbers(steps[-NUM_LAST:], column))
        if not self.is_supervised:
            seconds = sum(numbers(steps, "seconds/rollout"))
            figures["rollout_tokens_per_second"] = sum(numbers(steps, "rollout/tokens")) / seconds if seconds else None
            figures["parity_bit_equal_fraction"] = self._bit_equal_fraction()
            figures["parity_max_abs"] = max(numbers(steps, "parity/max_abs"), default=None)
        rows = {"before": self.before, "after": self.after, "best": self.best}
        for column, (name, _, _) in HELD_OUT.items():
            if self._has(column):
                figures |= {f"{name}_{when}": None if row is None else row.get(column) for when, row in rows.items()}
        return figures | {"train_seconds": sum(numbers(steps, "seconds/total")), "peak_memory_gb": self.peak_memory_gb}

    def _has(self, column: str) -> bool:
        """Whether this run tells a measure of evaluations: one that samples tells accuracies even without any."""
        is_usual = column == "heldout/accuracy" and not self.is_supervised
        return is_usual or any(column in row for row in self.evaluations)

    def _bit_equal_fraction(self) -> float | None:
        """Return it over all tokens that were compared in the run."""
        compared = [row for row in self.steps if row.get("parity/bit_equal_fraction") is not None]
        counts = [row.get("parity/tokens") or 0 for row in compared]
        equal = sum(row["parity/bit_equal_fraction"] * count for row, count in zip(compared, counts, strict=True))
        return equal / sum(counts) if sum(counts) else None


def parity_text(figures: Mapping[str, float | None]) -> str:
    fraction = figures["parity_bit_equal_fraction"]
    if fraction is None:
        return MISSING
    # rounding must not turn one different token into "100%"
    equal = "all" if fraction == 1 else f"{math.floor(fraction * 10_000) / 100:.2f}%"
    return f"{equal} bit-equal, largest difference {number(figures['parity_max_abs'])}"


def score_of(row: MetricsRow) -> float | None:
    """Return what versions are compared by: the accuracy of an evaluation, or the loss times -1 without one."""
    accuracy_value, loss = row.get("heldout/accuracy"), row.get("heldout/loss")
    if accuracy_value is not None or loss is None:
        return accuracy_value
    return -float(loss)


def best_text(row: MetricsRow) -> str:
    """Return the version of an evaluation, the base without a trained one, and its score."""
    by_loss = f"loss {number(row.get('heldout/loss'))}"
    score = percent(row["heldout/accuracy"]) if "heldout/accuracy" in row else by_loss
    return f"{row['heldout/version'] or 'base'} ({score})"


def numbers(rows: Sequence[MetricsRow], name: str) -> list[float]:
    """Return the numbers under `name` of the rows that have one."""
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def flat_reward_advice(steps: Sequence[MetricsRow]) -> str | None:
    """Return a text for a run whose reward has not risen beyond its noise, with what to try.

    None for a run that has risen, is too short, has no rewards, or was not to learn.
    """
    rewards = numbers(steps, "reward/mean")
    has_moved = any((row.get("update/adapter_delta_norm") or 0) > 0 for row in steps)
    trend = _trend(rewards) if len(rewards) >= MIN_STEPS else math.inf
    if trend >= SURE or not has_moved:
        return None
    third = len(rewards) // 3
    first, last = number(fmean(rewards[:third])), number(fmean(rewards[-third:]))
    what = "fallen" if trend <= -SURE else "not risen beyond its noise"
    thirds = f"{first} in the first third, {last} in the last"
    return f"the reward has {what} in {len(rewards)} steps ({thirds}): {_advice(steps)}"


def _trend(rewards: Sequence[float]) -> float:
    """Slope over the steps, in its standard errors; 0 where all are equal."""
    steps = range(len(rewards))
    slope, intercept = linear_regression(steps, rewards)
    squares = sum((reward - intercept - slope * step) ** 2 for step, reward in zip(steps, rewards, strict=True))
    spread = sum((step - fmean(steps)) ** 2 for step in steps)
    error = math.sqrt(squares / (len(rewards) - 2) / spread)
    return slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0


def _advice(steps: Sequence[MetricsRow]) -> str:
    sampled = sum(row.get("groups/sampled") or 0 for row in steps)
    with_signal = sum(row.get("groups/with_signal") or 0 for row in steps)
    if sampled and with_signal < LITTLE_SIGNAL * sampled:
        return (
            f"{percent(with_signal / sampled)} of the groups had completions with different rewards; choose problems "
            "that the model solves sometimes, or raise rollout.group_size or rollout.temperature"
        )
    return "read samples.jsonl, and try more steps, a higher learner.learning_rate, or more problems a step"
