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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Rows of metrics.jsonl and evaluations.jsonl in order of steps, and what is known at the end."""

    folder: Path
    steps: Sequence[MetricsRow]
    evaluations: Sequence[MetricsRow]
    peak_memory_gb: float | None

    def figures(self, prefix: str) -> dict[str, float | None]:
        """Return `{prefix}.{name}` for each figure of this kind of run; null where a number is missing."""
        named = {
            "steps": len(self.steps),
            **(self._figures_of_training() if self.is_supervised else self._figures_of_sampling()),
            **self._figures_of_evaluations(),
            "train_seconds": self.train_seconds,
            "peak_memory_gb": self.peak_memory_gb,
        }
        return {f"{prefix}.{name}": value for name, value in named.items()}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that ends a run: name and value."""
        memory = MISSING if self.peak_memory_gb is None else f"{self.peak_memory_gb:.2f} GB"
        return [
            *self._rows_of_evaluations(),
            *self._progress(),
            ("training time", f"{duration(self.train_seconds)} in {len(self.steps)} steps"),
            *([] if self.is_supervised else [("rollout tokens/s", number(self.rollout_tokens_per_second))]),
            ("peak memory", memory),
            *([] if self.is_supervised else [("learner and engine log-probs", self._parity_text())]),
            (FILES, short_path(self.folder)),
        ]

    @property
    def is_supervised(self) -> bool:
        """Trained on given completions or pairs: nothing was sampled."""
        return bool(self.steps) and "reward/mean" not in self.steps[0]

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first step, which is that of the untrained policy."""
        return column(self.steps[:1], "reward/mean")[0] if self.steps else None

    @property
    def reward_last(self) -> float | None:
        return self._last("reward/mean")

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

    @property
    def train_seconds(self) -> float:
        """Wall time inside the steps, evaluations and start excluded."""
        return sum(value for value in column(self.steps, "seconds/total") if value is not None)

    @property
    def rollout_tokens_per_second(self) -> float | None:
        tokens = sum(value for value in column(self.steps, "rollout/tokens") if value is not None)
        seconds = sum(value for value in column(self.steps, "seconds/rollout") if value is not None)
        return tokens / seconds if seconds else None

    @property
    def parity_max_abs(self) -> float | None:
        return max((value for value in column(self.steps, "parity/max_abs") if value is not None), default=None)

    @property
    def bit_equal_fraction(self) -> float | None:
        """Over all tokens that were compared in the run."""
        fractions, counts = column(self.steps, "parity/bit_equal_fraction"), column(self.steps, "parity/tokens")
        compared = [
            (fraction, tokens)
            for fraction, tokens in zip(fractions, counts, strict=True)
            if fraction is not None and tokens
        ]
        total = sum(tokens for _, tokens in compared)
        return sum(fraction * tokens for fraction, tokens in compared) / total if total else None

    def _figures_of_sampling(self) -> dict[str, float | None]:
        return {
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "rollout_tokens_per_second": self.rollout_tokens_per_second,
            "parity_bit_equal_fraction": self.bit_equal_fraction,
            "parity_max_abs": self.parity_max_abs,
        }

    def _figures_of_training(self) -> dict[str, float | None]:
        names = {"loss": "update/loss", "training_accuracy": "update/accuracy", "training_margin": "update/margin"}
        present = {name: column_name for name, column_name in names.items() if column_name in self.steps[0]}
        firsts = {f"{name}_first": column(self.steps[:1], column_name)[0] for name, column_name in present.items()}
        return firsts | {f"{name}_last": self._last(column_name) for name, column_name in present.items()}

    def _figures_of_evaluations(self) -> dict[str, float | None]:
        """Accuracies; of supervised runs the measures that there are."""
        names = {"accuracy": "heldout/accuracy", "heldout_loss": "heldout/loss", "heldout_margin": "heldout/margin"}
        usual = () if self.is_supervised else ("accuracy",)
        rows = {"before": self.before, "after": self.after, "best": self.best}
        return {
            f"{name}_{when}": None if row is None else row.get(column_name)
            for name, column_name in names.items()
            if name in usual or any(column_name in row for row in self.evaluations)
            for when, row in rows.items()
        }

    def _rows_of_evaluations(self) -> list[tuple[str, str]]:
        best = self.best
        rows = []
        if any("heldout/loss" in row for row in self.evaluations):
            rows += [("held-out loss before", loss_text(self.before)), ("held-out loss after", loss_text(self.after))]
        if not self.is_supervised or any("heldout/accuracy" in row for row in self.evaluations):
            rows.append(("held-out accuracy before", accuracy_text(self.before)))
            rows.append(("held-out accuracy after", accuracy_text(self.after)))
        if any("heldout/margin" in row for row in self.evaluations):
            rows += [
                ("held-out margin before", margin_text(self.before)),
                ("held-out margin after", margin_text(self.after)),
            ]
        if rows:
            rows.append(("best version", MISSING if best is None else f"{version_text(best)} ({score_text(best)})"))
        return rows

    def _progress(self) -> list[tuple[str, str]]:
        """Reward at the beginning and at the end; of a supervised run, which has none, the loss."""
        name, column_name = ("loss", "update/loss") if self.is_supervised else ("reward", "reward/mean")
        first = column(self.steps[:1], column_name)[0] if self.steps else None
        num_last = min(NUM_LAST, len(self.steps))
        return [
            (f"{name}, first step", number(first)),
            (f"{name}, last {num_last} steps", number(self._last(column_name))),
        ]

    def _last(self, column_name: str) -> float | None:
        """The mean over the last steps."""
        return mean(column(self.steps[-NUM_LAST:], column_name))

    def _parity_text(self) -> str:
        fraction = self.bit_equal_fraction
        if fraction is None:
            return MISSING
        # rounding must not turn one different token into "100%"
        equal = "all" if fraction == 1 else f"{math.floor(fraction * 10_000) / 100:.2f}%"
        return f"{equal} bit-equal, largest difference {number(self.parity_max_abs)}"


def score_of(row: MetricsRow) -> float | None:
    """Return what versions are compared by: the accuracy of an evaluation, or the loss times -1 without one."""
    accuracy_value, loss = row.get("heldout/accuracy"), row.get("heldout/loss")
    if accuracy_value is not None or loss is None:
        return accuracy_value
    return -float(loss)


def score_text(row: MetricsRow) -> str:
    if "heldout/accuracy" in row:
        return percent(row["heldout/accuracy"])
    return f"loss {number(row.get('heldout/loss'))}"


def version_text(row: MetricsRow) -> str:
    """Return the version of an evaluation; without a trained one it was the base."""
    return str(row["heldout/version"] or "base")


def accuracy_text(row: MetricsRow | None) -> str:
    """Return accuracy, interval, problems and step of an evaluation."""
    if row is None:
        return MISSING
    text = accuracy(row.get("heldout/accuracy"), row.get("heldout/low"), row.get("heldout/high"))
    unit = "pairs" if "heldout/margin" in row else "problems"
    return f"{text}, {row.get('heldout/problems')} {unit}, step {row['step']}"


def loss_text(row: MetricsRow | None) -> str:
    """Return loss, number of demonstrations and step of an evaluation."""
    if row is None:
        return MISSING
    num = row.get("heldout/demonstrations")
    of = f", {num} demonstrations" if num else ""
    return f"{number(row.get('heldout/loss'))}{of}, step {row['step']}"


def margin_text(row: MetricsRow | None) -> str:
    """Return the margin of an evaluation of a reward model with its interval."""
    if row is None:
        return MISSING
    low, high = number(row.get("heldout/margin_low")), number(row.get("heldout/margin_high"))
    return f"{number(row.get('heldout/margin'))} ({low} to {high})"


def column(rows: Sequence[MetricsRow], name: str) -> list[float | None]:
    """Return the numbers under `name`, None where a row has none."""
    values = [row.get(name) for row in rows]
    return [float(value) if isinstance(value, int | float) else None for value in values]


def mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def flat_reward_advice(steps: Sequence[MetricsRow]) -> str | None:
    """Return a text for a run whose reward has not risen beyond its noise, with what to try.

    None for a run that has risen, is too short, has no rewards, or was not to learn.
    """
    rewards = [float(row["reward/mean"]) for row in steps if isinstance(row.get("reward/mean"), int | float)]
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
