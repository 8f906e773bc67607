"""Flat names of steps and evaluations."""

from collections.abc import Callable
from dataclasses import replace

from parallm.metrics.display import evaluation_line, step_line
from parallm.metrics.eta import Schedule
from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.reports import Estimate, EvaluationReport, OffPolicyReport, PairsReport


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


def test_a_step_of_a_reward_model_says_how_it_orders_pairs(step: Callable[..., StepMetrics]) -> None:
    plain = step(3)
    assert plain.update is not None
    update = replace(plain.update, pairs=PairsReport(accuracy=0.75, margin=1.25), entropy=float("nan"))
    metrics = step(3, is_supervised=True, update=update)
    row = metrics.to_flat()
    assert (row["update/accuracy"], row["update/margin"]) == (0.75, 1.25)
    assert not any(name.startswith(("parity", "reward")) or name == "update/entropy" for name in row)
    assert "accuracy 75.0%  margin 1.25" in step_line(metrics, Schedule(total_steps=5), "")
    assert "entropy" not in step_line(metrics, Schedule(total_steps=5), "")


def test_an_evaluation_of_a_reward_model_has_a_margin(evaluation: Callable[..., EvaluationReport]) -> None:
    report = evaluation(20, margin=Estimate(1.5, 1.0, 2.0), reward_parts={}, loss=0.25)
    row = evaluation_row(report)
    assert (row["heldout/margin_low"], row["heldout/margin"], row["heldout/margin_high"]) == (1.0, 1.5, 2.0)
    assert "512 pairs, version 20, reward 0.500, margin 1.50 (1.00 to 2.00), loss 0.250" in evaluation_line(report)


def test_parts_of_rollouts_are_no_shares(evaluation: Callable[..., EvaluationReport]) -> None:
    parts = {"correct": Estimate(0.5, 0, 1), "rollout/reward_model": Estimate(-2.5, -3, -2)}
    assert evaluation_line(evaluation(20, reward_parts=parts)).endswith("correct 50.0%, rollout/reward_model -2.50")
