"""The figures of a whole run."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parallm.metrics.summary import MetricsRow, RunSummary, flat_reward_advice

STEPS: list[MetricsRow] = [
    {
        "step": number,
        "reward/mean": reward,
        "seconds/total": 4.0,
        "seconds/rollout": 2.0,
        "rollout/tokens": 1000,
        "parity/tokens": tokens,
        "parity/bit_equal_fraction": fraction,
        "parity/max_abs": difference,
    }
    for number, reward, tokens, fraction, difference in [
        (1, 0.2, 100, 1.0, 0.0),
        (2, 0.3, 300, 0.99, 2e-6),
        (3, 0.5, 0, None, None),
        (4, 0.6, 100, 1.0, 0.0),
        (5, 0.7, 100, 1.0, 0.0),
    ]
]


def evaluation(step: int, accuracy: float) -> MetricsRow:
    return {
        "step": step,
        "heldout/accuracy": accuracy,
        "heldout/low": accuracy - 0.04,
        "heldout/high": accuracy + 0.04,
        "heldout/problems": 512,
        "heldout/version": step,
    }


def summary(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> RunSummary:
    return RunSummary(folder=Path("runs/one"), steps=steps, evaluations=evaluations, peak_memory_gb=1.5)


def test_figures_carry_the_prefix() -> None:
    figures = summary(STEPS, [evaluation(0, 0.3), evaluation(3, 0.8), evaluation(5, 0.7)]).figures("quickstart")
    assert figures["quickstart.accuracy_before"] == 0.3
    assert figures["quickstart.accuracy_after"] == 0.7
    assert figures["quickstart.accuracy_best"] == 0.8
    assert figures["quickstart.reward_first"] == 0.2
    assert figures["quickstart.reward_last"] == pytest.approx(0.6)
    assert figures["quickstart.train_seconds"] == 20.0
    assert figures["quickstart.rollout_tokens_per_second"] == 500.0
    assert figures["quickstart.peak_memory_gb"] == 1.5
    assert figures["quickstart.parity_bit_equal_fraction"] == pytest.approx(597 / 600)
    assert figures["quickstart.parity_max_abs"] == 2e-6


def test_one_evaluation_before_the_first_step_is_not_the_one_after() -> None:
    figures = summary(STEPS[:2], [evaluation(0, 0.3)]).figures("run")
    assert (figures["run.accuracy_before"], figures["run.accuracy_after"]) == (0.3, None)


def test_one_evaluation_after_the_steps_is_not_the_one_before() -> None:
    figures = summary(STEPS, [evaluation(5, 0.7)]).figures("run")
    assert (figures["run.accuracy_before"], figures["run.accuracy_after"]) == (None, 0.7)


def test_of_equally_good_versions_the_newest_is_the_best() -> None:
    rows = dict(summary(STEPS, [evaluation(0, 0.0625), evaluation(3, 0.0), evaluation(5, 0.0625)]).rows())
    assert rows["best version"] == "5 (6.2%)"


def test_the_table_gives_accuracies_with_their_interval() -> None:
    rows = dict(summary(STEPS, [evaluation(0, 0.3), evaluation(5, 0.7)]).rows())
    assert rows["held-out accuracy after"] == "70.0% (66.0% to 74.0%), 512 problems, step 5"
    assert rows["best version"] == "5 (70.0%)"
    equal = dict(summary(STEPS, [evaluation(0, 0.3), evaluation(3, 0.3), evaluation(5, 0.3)]).rows())
    assert equal["best version"] == "5 (30.0%)"
    worse = dict(summary(STEPS, [evaluation(0, 0.3), evaluation(5, 0.2)]).rows())
    assert worse["best version"] == "base (30.0%)"
    assert rows["peak memory"] == "1.50 GB"
    assert rows["files"] == "runs/one"


def test_rounding_does_not_hide_a_token_that_differs() -> None:
    nearly = {**STEPS[0], "parity/tokens": 100_000, "parity/bit_equal_fraction": 0.99999, "parity/max_abs": 1e-7}
    assert dict(summary([nearly], []).rows())["learner and engine log-probs"].startswith("99.99% bit-equal")
    assert dict(summary([STEPS[0]], []).rows())["learner and engine log-probs"].startswith("all bit-equal")


def supervised(number: int, **numbers: float) -> MetricsRow:
    return {"step": number, "seconds/total": 2.0, **{f"update/{name}": value for name, value in numbers.items()}}


def test_a_supervised_run_tells_its_losses_and_nothing_of_samples() -> None:
    steps = [supervised(number, loss=loss) for number, loss in enumerate((2.0, 1.5, 1.2, 0.9), start=1)]
    losses = [
        {"step": step, "heldout/version": step, "heldout/loss": loss, "heldout/demonstrations": 57}
        for step, loss in ((0, 2.2), (2, 1.4), (4, 1.6))
    ]
    found = summary(steps, losses)
    assert found.figures("sft") == {
        "sft.steps": 4,
        "sft.loss_first": 2.0,
        "sft.loss_last": pytest.approx(1.2),
        "sft.heldout_loss_before": 2.2,
        "sft.heldout_loss_after": 1.6,
        "sft.heldout_loss_best": 1.4,
        "sft.train_seconds": 8.0,
        "sft.peak_memory_gb": 1.5,
    }
    rows = dict(found.rows())
    assert rows["held-out loss after"] == "1.60, 57 demonstrations, step 4"
    assert rows["best version"] == "2 (loss 1.40)"
    assert not any("accuracy" in name or "rollout" in name or "log-probs" in name for name in rows)


def test_a_reward_model_tells_accuracies_and_margins() -> None:
    steps = [supervised(number, loss=0.6, accuracy=0.5 + number / 10, margin=number / 2) for number in (1, 2)]
    pairs = [
        {
            **evaluation(step, 0.6 + step / 10),
            "heldout/margin": 1.0,
            "heldout/margin_low": 0.5,
            "heldout/margin_high": 2.0,
        }
        for step in (0, 2)
    ]
    figures = summary(steps, pairs).figures("rm")
    assert (figures["rm.training_accuracy_first"], figures["rm.training_margin_last"]) == (0.6, 0.75)
    assert (figures["rm.accuracy_after"], figures["rm.heldout_margin_after"]) == (0.8, 1.0)
    rows = dict(summary(steps, pairs).rows())
    assert rows["held-out accuracy after"].endswith("512 pairs, step 2")
    assert rows["held-out margin after"] == "1.00 (0.500 to 2.00)"


def test_a_supervised_run_in_an_environment_tells_loss_and_accuracy() -> None:
    both = {**evaluation(0, 0.3), "heldout/loss": 2.2, "heldout/demonstrations": 57}
    figures = summary([supervised(1, loss=2.0)], [both]).figures("sft")
    assert (figures["sft.accuracy_before"], figures["sft.heldout_loss_before"]) == (0.3, 2.2)


def test_a_supervised_run_without_evaluations_says_nothing_of_them() -> None:
    names = [name for name, _ in summary([supervised(1, loss=2.0)], []).rows()]
    assert names == ["loss, first step", "loss, last 1 steps", "training time", "peak memory", "files"]


def rows(rewards: Sequence[float | None], *, delta: float = 0.01, signal: int = 8) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": reward,
            "update/adapter_delta_norm": delta,
            "groups/sampled": 16,
            "groups/with_signal": signal,
        }
        for step, reward in enumerate(rewards, start=1)
    ]


def noisy(rise: float, *, count: int = 20, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [0.3 + rise * step / count + chance.gauss(0, 0.05) for step in range(count)]


def test_a_flat_reward_is_named_with_what_to_try() -> None:
    assert flat_reward_advice(rows([0.12, 0.1, 0.14, 0.12, 0.12, 0.1, 0.14, 0.12])) == (
        "the reward has not risen beyond its noise in 8 steps (0.110 in the first third, 0.130 in the last): read "
        "samples.jsonl, and try more steps, a higher learner.learning_rate, or more problems a step"
    )


def test_where_hardly_a_group_has_signal_the_problems_are_named() -> None:
    text = flat_reward_advice(rows([1.0] * 9, signal=1))
    assert text is not None
    assert text.endswith(
        "6.2% of the groups had completions with different rewards; choose problems that the model solves sometimes, "
        "or raise rollout.group_size or rollout.temperature"
    )


def test_a_fall_is_called_so() -> None:
    text = flat_reward_advice(rows(noisy(-0.4)))
    assert text is not None
    assert text.startswith("the reward has fallen in 20 steps (0.2")


@pytest.mark.parametrize("seed", range(20))
def test_a_clear_rise_is_seen_through_noise(seed: int) -> None:
    assert flat_reward_advice(rows(noisy(0.3, seed=seed))) is None


def test_noise_is_seldom_taken_for_a_rise() -> None:
    assert sum(flat_reward_advice(rows(noisy(0.0, seed=seed))) is None for seed in range(200)) <= 12


@pytest.mark.parametrize(
    "steps",
    [
        rows([0.1] * 5),
        rows([None] * 9),
        rows([0.1] * 9, delta=0.0),
        [{"step": 1, "update/loss": 2.0}] * 9,
        [],
        rows([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
    ids=["short", "no rewards", "learning rate 0", "supervised", "none", "straight"],
)
def test_a_run_that_learned_or_was_not_to_is_told_nothing(steps: list[dict[str, Any]]) -> None:
    assert flat_reward_advice(steps) is None
