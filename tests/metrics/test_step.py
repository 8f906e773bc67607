"""Flat names of steps and evaluations."""

from collections.abc import Callable

from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.reports import Estimate, EvaluationReport, OffPolicyReport


def test_a_step_has_one_flat_name_per_number(step: Callable[..., StepMetrics]) -> None:
    row = step(3).to_flat()
    assert row["step"] == 3
    assert row["reward/mean"] == 0.25
    assert row["reward_part/correct"] == 0.25
    assert row["rollout/tokens_per_second"] == 500.0
    assert row["parity/max_abs"] == 0.0
    assert row["update/version"] == 3
    assert row["update/skipped"] is None


def test_a_step_says_how_old_its_tokens_were(step: Callable[..., StepMetrics]) -> None:
    row = step(3, off_policy=OffPolicyReport(lag_mean=0.75, lag_max=2, dropped=1)).to_flat()
    assert (row["offpolicy/lag_mean"], row["offpolicy/lag_max"], row["offpolicy/dropped"]) == (0.75, 2, 1)
    assert (row["offpolicy/tokens"], row["offpolicy/ratio_mean"]) == (700, 1.0)
    assert (row["offpolicy/ratio_min"], row["offpolicy/ratio_max"]) == (0.5, 1.75)


def test_a_step_without_an_update_says_why(step: Callable[..., StepMetrics]) -> None:
    row = step(3, update=None).to_flat()
    assert row["update/skipped"] == "no group had a signal"
    assert "update/loss" not in row


def test_an_evaluation_keeps_its_interval(evaluation: Callable[..., EvaluationReport]) -> None:
    row = evaluation_row(evaluation(20))
    assert row["step"] == 20
    assert (row["heldout/low"], row["heldout/accuracy"], row["heldout/high"]) == (0.27, 0.31, 0.35)
    assert (row["heldout/reward"], row["heldout/reward_high"]) == (0.5, 0.55)
    assert (row["heldout_part/correct_low"], row["heldout_part/correct"]) == (0.27, 0.31)
    assert "heldout/samples" not in row


def test_an_evaluation_with_samples_has_a_row_entry_for_each_k(evaluation: Callable[..., EvaluationReport]) -> None:
    pass_at = {1: Estimate(0.3, 0.2, 0.4), 8: Estimate(0.8, 0.7, 0.9)}
    row = evaluation_row(evaluation(20, pass_at=pass_at, num_samples=8, temperature=0.7))
    assert (row["heldout/pass@8_low"], row["heldout/pass@8"], row["heldout/pass@8_high"]) == (0.7, 0.8, 0.9)
    assert (row["heldout/samples"], row["heldout/temperature"]) == (8, 0.7)
