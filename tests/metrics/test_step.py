"""Flat names of steps and evaluations."""

from collections.abc import Callable

from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.types import EvaluationReport, OffPolicyReport


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
