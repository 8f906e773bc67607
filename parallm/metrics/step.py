"""Metrics of one training step and one evaluation, and the flat names under which all files write them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from parallm.reports import EvaluationReport, OffPolicyReport, UpdateReport

FlatRow: TypeAlias = dict[str, float | int | str | None]
SAMPLING_ONLY = ("update/clip_fraction", "update/kl_to_behaviour", "guard/empty_completions", "seconds/rollout")
NO_SIGNAL = "no group had a signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of the loop: what was collected, what the update did, and how long both took."""

    step: int
    """Counts from 1; an evaluation with the same number came after this step, one with 0 before the first."""
    reward_mean: float
    reward_std: float
    """Over all completions of the step, groups without signal included."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each named part."""
    environments: Mapping[str, float] = field(default_factory=dict)
    """`NAME/reward` and so on, where several environments are mixed."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Completions that could not be scored, by kind of fault; they are in none of the other numbers."""
    problems_skipped: int = 0
    """Problems that the curriculum has passed over."""
    groups_sampled: int
    groups_with_signal: int
    completion_length_mean: float
    """Tokens."""
    truncated_fraction: float
    """Completions that ended at `max_tokens`."""
    rollout_tokens: int
    """Tokens sampled for this step, those of dropped groups included."""
    rollout_seconds: float
    """Time from the first request to the last score; steps that are sampled ahead overlap with others."""
    update_seconds: float
    """Wall time; `update.seconds` is device time."""
    total_seconds: float
    rollout_tokens_per_second: float
    serving_tokens_per_second: float
    off_policy: OffPolicyReport = OffPolicyReport(lag_mean=0.0, lag_max=0, dropped=0)
    source: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the source of groups, under their flat names."""
    guard: FlatRow = field(default_factory=dict)
    """Faults and roll-backs of the run so far, under their flat names."""
    is_supervised: bool = False
    """Trained on given completions: there are no rewards, and nothing was sampled."""
    update: UpdateReport | None = None
    """None if no group had a signal, so that there was nothing to update with."""

    def to_flat(self) -> FlatRow:
        """Return one number per name; the order of the names is fixed and numbers may be NaN."""
        row: FlatRow = {
            "step": self.step,
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            **{f"reward_part/{name}": value for name, value in self.reward_parts.items()},
            **{f"environment/{name}": value for name, value in self.environments.items()},
            "faults/total": sum(self.faults.values()),
            **{f"faults/{kind}": number for kind, number in self.faults.items()},
            "problems/skipped": self.problems_skipped,
            "groups/sampled": self.groups_sampled,
            "groups/with_signal": self.groups_with_signal,
            "completion/length_mean": self.completion_length_mean,
            "completion/truncated_fraction": self.truncated_fraction,
            **update_row(self.update),
            "offpolicy/lag_mean": self.off_policy.lag_mean,
            "offpolicy/lag_max": self.off_policy.lag_max,
            "offpolicy/dropped": self.off_policy.dropped,
            **self.source,
            **self.guard,
            "seconds/rollout": self.rollout_seconds,
            "seconds/update": self.update_seconds,
            "seconds/total": self.total_seconds,
            "rollout/tokens": self.rollout_tokens,
            "rollout/tokens_per_second": self.rollout_tokens_per_second,
            "serving/tokens_per_second": self.serving_tokens_per_second,
        }
        return {name: row[name] for name in row if _is_supervised(name)} if self.is_supervised else row


def _is_supervised(name: str) -> bool:
    """Whether a supervised run has this metric."""
    part = name.partition("/")[0]
    return part in ("step", "update", "guard", "seconds", "serving") and name not in SAMPLING_ONLY


def update_row(update: UpdateReport | None) -> FlatRow:
    """Return the flat names of an update and its parity; none of them if there was no update.

    The update of a reward model orders pairs and has no policy to compare.
    """
    if update is None:
        return {"update/skipped": NO_SIGNAL}
    pairs, kl_to_base = update.pairs, update.kl_to_base
    return {
        "update/version": update.version,
        "update/loss": update.loss,
        **({} if pairs is None else {"update/accuracy": pairs.accuracy, "update/margin": pairs.margin}),
        "update/gradient_norm": update.gradient_norm,
        "update/adapter_delta_norm": update.adapter_delta_norm,
        "update/adapter_delta_relative": update.adapter_delta_relative,
        "update/learning_rate": update.learning_rate,
        "update/clip_fraction": update.clip_fraction,
        "update/kl_to_behaviour": update.kl_to_behaviour,
        **({} if kl_to_base is None else {"update/kl_to_base": kl_to_base}),
        **({"update/entropy": update.entropy} if pairs is None else {}),
        "update/tokens": update.num_tokens,
        "update/device_seconds": update.seconds,
        "update/skipped": update.skipped,
        "parity/tokens": update.parity.num_tokens,
        "parity/bit_equal_fraction": update.parity.bit_equal_fraction,
        "parity/mean_abs": update.parity.mean_abs,
        "parity/max_abs": update.parity.max_abs,
        "offpolicy/tokens": update.ratio.num_tokens,
        "offpolicy/ratio_mean": update.ratio.mean,
        "offpolicy/ratio_min": update.ratio.smallest,
        "offpolicy/ratio_max": update.ratio.largest,
    }


def evaluation_row(report: EvaluationReport) -> FlatRow:
    """Return the flat names of an evaluation; each mean over problems has a `_low` and a `_high`."""
    row: FlatRow = {"step": report.step, "heldout/version": report.version}
    row |= {} if report.loss is None else {"heldout/loss": report.loss}
    row |= {"heldout/demonstrations": report.num_demonstrations} if report.num_demonstrations else {}
    if report.is_of_loss:
        return row
    row |= {"heldout/accuracy": report.accuracy, "heldout/low": report.low, "heldout/high": report.high}
    row |= {"heldout/problems": report.num_problems}
    means = {
        "heldout/reward": report.reward,
        **{f"heldout/pass@{k}": estimate for k, estimate in report.pass_at.items()},
        **({} if report.margin is None else {"heldout/margin": report.margin}),
        **{f"heldout_part/{name}": estimate for name, estimate in report.reward_parts.items()},
    }
    for name, estimate in means.items():
        row |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    if report.num_samples:
        row |= {"heldout/samples": report.num_samples, "heldout/temperature": report.temperature}
    return row
