"""A whole run in a few numbers, computed from what is on disk, so that a resumed run counts from its beginning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallm.metrics.run_header import FILES
from parallm.metrics.wording import MISSING, accuracy, duration, number, percent, short_path

Row = Mapping[str, Any]
NUM_LAST = 3
"""`reward_last` is the mean over this many steps, since a single step's reward is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Rows of metrics.jsonl and evaluations.jsonl in order of steps, with what is only known at the end."""

    folder: Path
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    peak_memory_gb: float | None

    def figures(self, prefix: str) -> dict[str, float | None]:
        """Return `{prefix}.{name}` for each figure that this run can tell; null where a number is not finite."""
        named = {
            "steps": len(self.steps),
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "accuracy_before": accuracy_of(self.before),
            "accuracy_after": accuracy_of(self.after),
            "accuracy_best": accuracy_of(self.best),
            "train_seconds": self.train_seconds,
            "rollout_tokens_per_second": self.rollout_tokens_per_second,
            "peak_memory_gb": self.peak_memory_gb,
            "parity_bit_equal_fraction": self.bit_equal_fraction,
            "parity_max_abs": self.parity_max_abs,
        }
        return {f"{prefix}.{name}": value for name, value in named.items()}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that ends a run: name and value."""
        best = self.best
        memory = MISSING if self.peak_memory_gb is None else f"{self.peak_memory_gb:.2f} GB"
        return [
            ("held-out accuracy before", accuracy_text(self.before)),
            ("held-out accuracy after", accuracy_text(self.after)),
            ("best version", MISSING if best is None else f"{version_text(best)} ({percent(accuracy_of(best))})"),
            *self._progress(),
            ("training time", f"{duration(self.train_seconds)} in {len(self.steps)} steps"),
            ("rollout tokens/s", number(self.rollout_tokens_per_second)),
            ("peak memory", memory),
            ("learner and engine log-probs", self._parity_text()),
            (FILES, short_path(self.folder)),
        ]

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first step, which is that of the untrained policy."""
        return column(self.steps[:1], "reward/mean")[0] if self.steps else None

    @property
    def reward_last(self) -> float | None:
        return mean(column(self.steps[-NUM_LAST:], "reward/mean"))

    @property
    def before(self) -> Row | None:
        """The evaluation before the first step; None if the run began without one."""
        first_step = self.steps[0]["step"] if self.steps else math.inf
        return self.evaluations[0] if self.evaluations and self.evaluations[0]["step"] < first_step else None

    @property
    def after(self) -> Row | None:
        """The last evaluation, unless it is the one before the first step."""
        return self.evaluations[-1] if self.evaluations and self.evaluations[-1] is not self.before else None

    @property
    def best(self) -> Row | None:
        """The evaluation with the highest accuracy, the newest of equal ones."""
        known = [row for row in self.evaluations if row.get("heldout/accuracy") is not None]
        return max(reversed(known), key=lambda row: float(row["heldout/accuracy"]), default=None)

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
        known = [
            (fraction, tokens)
            for fraction, tokens in zip(fractions, counts, strict=True)
            if fraction is not None and tokens
        ]
        total = sum(tokens for _, tokens in known)
        return sum(fraction * tokens for fraction, tokens in known) / total if total else None

    def _progress(self) -> list[tuple[str, str]]:
        """Reward at the beginning and at the end; of a supervised run, which has none, the loss."""
        is_supervised = bool(self.steps) and "reward/mean" not in self.steps[0]
        name, column_name = ("loss", "update/loss") if is_supervised else ("reward", "reward/mean")
        first = column(self.steps[:1], column_name)[0] if self.steps else None
        last = mean(column(self.steps[-NUM_LAST:], column_name))
        num_last = min(NUM_LAST, len(self.steps))
        return [(f"{name}, first step", number(first)), (f"{name}, last {num_last} steps", number(last))]

    def _parity_text(self) -> str:
        fraction = self.bit_equal_fraction
        if fraction is None:
            return MISSING
        # rounding must not turn one different token into "100%"
        equal = "all" if fraction == 1 else f"{math.floor(fraction * 10_000) / 100:.2f}%"
        return f"{equal} bit-equal, largest difference {number(self.parity_max_abs)}"


def version_text(row: Row) -> str:
    """Return the version of an evaluation; without a trained one it was the base."""
    return str(row["heldout/version"] or "base")


def accuracy_of(row: Row | None) -> float | None:
    return None if row is None else row.get("heldout/accuracy")


def accuracy_text(row: Row | None) -> str:
    """Return accuracy, interval, problems and step of an evaluation."""
    if row is None:
        return MISSING
    text = accuracy(row.get("heldout/accuracy"), row.get("heldout/low"), row.get("heldout/high"))
    return f"{text}, {row.get('heldout/problems')} problems, step {row['step']}"


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """Return the numbers under `name`, None where a row has none."""
    values = [row.get(name) for row in rows]
    return [float(value) if isinstance(value, int | float) else None for value in values]


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
