"""Panels of each kind of run."""

import math
from pathlib import Path
from typing import Any

import pytest

from parallm.metrics.curves import Panel, draw_curves, panels_of, running_mean

ROLLOUTS: dict[str, Any] = {
    "reward/mean": 0.5,
    "reward_part/correct": 0.4,
    "groups/sampled": 4,
    "groups/with_signal": 3,
    "completion/length_mean": 60.0,
    "completion/truncated_fraction": 0.0,
    "update/loss": 0.01,
    "update/kl_to_behaviour": 0.0,
    "update/entropy": 0.3,
    "update/gradient_norm": 0.7,
    "update/learning_rate": 5e-5,
    "rollout/tokens_per_second": 900.0,
    "serving/tokens_per_second": 0.0,
}
SUPERVISED: dict[str, Any] = {
    "update/loss": 1.5,
    "update/entropy": 0.3,
    "update/gradient_norm": 0.7,
    "update/learning_rate": 5e-5,
    "serving/tokens_per_second": 0.0,
}
PAIRS: dict[str, Any] = {"update/loss": 0.6, "update/accuracy": 0.7, "update/margin": 1.2, "update/gradient_norm": 0.7}
ACCURACY = {"step": 0, "heldout/accuracy": 0.3, "heldout/low": 0.26, "heldout/high": 0.34}
MARGIN = {"heldout/margin": 0.9, "heldout/margin_low": 0.7, "heldout/margin_high": 1.1}


def run(row: dict[str, Any], number: int = 4) -> list[dict[str, Any]]:
    return [{**row, "step": step} for step in range(1, number + 1)]


def titles(panels: list[Panel]) -> list[str]:
    return [panel.title for panel in panels]


def test_a_run_on_policy_has_no_panel_that_says_nothing() -> None:
    assert titles(panels_of(run(ROLLOUTS), [ACCURACY])) == [
        "reward and held-out accuracy",
        "share of groups with signal",
        "entropy (nats per token)",
        "gradient norm before clipping",
        "completion length (tokens)",
        "tokens per second",
    ]


def test_parts_environments_and_kls_have_panels_where_there_are_some() -> None:
    more = {
        "reward_part/format": 1.0,
        "environment/easy/reward": 0.9,
        "environment/hard/reward": 0.1,
        "update/kl_to_base": 0.01,
        "update/kl_to_behaviour": 1e-4,
    }
    panels = {panel.title: panel for panel in panels_of(run(ROLLOUTS | more), [])}
    assert [line.label for line in panels["reward parts"].series] == ["correct", "format"]
    assert [line.label for line in panels["reward by environment"].series] == ["easy", "hard"]
    assert panels.keys() >= {"KL to the base (nats per token)", "KL to the sampling policy (nats per token)"}


def test_the_learning_rate_is_drawn_where_it_changes_after_the_warm_up() -> None:
    warmed_up = [{**row, "update/learning_rate": min(1.0, row["step"] / 2)} for row in run(ROLLOUTS, 8)]
    falling = [{**row, "update/learning_rate": 1 / row["step"]} for row in run(ROLLOUTS, 8)]
    assert "learning rate" not in titles(panels_of(warmed_up, []))
    assert "learning rate" in titles(panels_of(falling, []))


def test_a_supervised_run_shows_its_loss_and_that_of_held_out_demonstrations() -> None:
    panels = panels_of(run(SUPERVISED), [{"step": 0, "heldout/loss": 1.7}, {"step": 4, "heldout/loss": 1.2}])
    assert titles(panels) == ["loss (nats per token)", "entropy (nats per token)", "gradient norm before clipping"]
    training, held_out = panels[0].series
    assert training.points == ((1, 1.5), (2, 1.5), (3, 1.5), (4, 1.5))
    assert held_out.points == ((0, 1.7), (4, 1.2))


def test_a_supervised_run_in_an_environment_shows_its_accuracy_too() -> None:
    panels = panels_of(run(SUPERVISED), [{**ACCURACY, "heldout/loss": 1.7}])
    assert titles(panels)[:2] == ["loss (nats per token)", "held-out accuracy"]


def test_a_reward_model_shows_loss_accuracy_and_margin() -> None:
    panels = panels_of(run(PAIRS), [{**ACCURACY, **MARGIN, "heldout/loss": 0.5}])
    assert titles(panels) == ["loss (nats per pair)", "accuracy on pairs", "margin", "gradient norm before clipping"]
    assert panels[0].series[1].points == ((0, 0.5),)
    assert panels[1].series[1].intervals == ((0.26, 0.34),)
    assert panels[2].series[1].points == ((0, 0.9),)


def test_numbers_that_are_missing_are_gaps() -> None:
    rows = run(ROLLOUTS)
    rows[1] = {**rows[1], "reward/mean": None}
    (_, second, *_) = panels_of(rows, [])[0].series[0].points
    assert second[0] == 2
    assert math.isnan(second[1])


def test_rewards_beyond_a_share_have_a_free_scale() -> None:
    assert panels_of(run(ROLLOUTS), [])[0].scale == "share"
    assert panels_of(run(ROLLOUTS | {"reward/mean": -3.0}), [])[0].scale == "free"


def test_a_run_without_steps_has_no_panels() -> None:
    assert panels_of([], []) == []


def test_the_running_mean_looks_back_only_and_skips_gaps() -> None:
    assert running_mean([1.0, 3.0, float("nan"), 5.0], 2) == [1.0, 2.0, 3.0, 5.0]


STEP = {"step": 1, "reward/mean": 0.5, "update/kl_to_behaviour": None, "completion/length_mean": 60.0}
EVALUATION = {"step": 0, "heldout/accuracy": 0.3, "heldout/low": 0.26, "heldout/high": 0.34}


@pytest.mark.parametrize(
    ("steps", "evaluations"),
    [
        ([], []),
        ([STEP], []),
        ([STEP], [EVALUATION]),
        ([{**STEP, "step": step} for step in range(100)], [EVALUATION]),
        ([{**STEP, "reward/mean": -3.0}], [EVALUATION]),
        ([{**STEP, "reward/mean": None}], [{"step": 0, "heldout/accuracy": None}]),
        ([{"step": 1, "update/loss": 1.5}], [{"step": 0, "heldout/loss": 1.7}]),
        ([{**STEP, "update/gradient_norm": 0.0, "completion/truncated_fraction": 0.5}], []),
    ],
)
def test_a_picture_is_written(tmp_path: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    draw_curves(steps, evaluations, file=tmp_path / "curves.png", title="run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
