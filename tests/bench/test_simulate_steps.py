"""Predictions of steps of many workers from those of one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulate_steps import Cluster, Costs, calibrated, predicted_efficiency, simulated

ROOT = Path(__file__).parents[2]
COSTS = Costs(samplings=(2.0,), update=0.5, host=0.0, others=0.0, rest=0.0, tokens=0.0, row_tokens=256.0)
UNEVEN = (1.8, 1.9, 2.1, 2.2)
CLUSTER = Cluster(latency=0.0, failure_hours=1e12, load=30.0)


def step(workers: int, costs: Costs = COSTS, *, size: float = 0.0, **design: bool) -> float:
    return simulated(workers, costs, CLUSTER, vector_bytes=size, **design)["step"]


def rows(workers: int, **changes: float) -> list[dict[str, float]]:
    row = {
        "seconds/rollout": 2.0,
        "update/device_seconds": 0.5,
        "seconds/update": 0.5,
        "rollout/tokens": 100.0 * workers,
    }
    return [row | changes | {"time": 100.0 + 2.6 * place} for place in range(6)]


def test_workers_that_cost_each_other_nothing_are_as_fast_as_one() -> None:
    assert [step(workers) for workers in (1, 2, 64)] == pytest.approx([2.5] * 3)


@pytest.mark.parametrize("changes", [{"samplings": UNEVEN}, {"others": 0.01}, {"tokens": 1e6}])
def test_each_cost_grows_with_the_number_of_workers(changes: dict[str, Any]) -> None:
    costs = replace(COSTS, **changes)
    assert step(1, costs) < step(8, costs) < step(64, costs)


def test_the_tree_costs_less_than_the_star() -> None:
    costs = replace(COSTS, others=0.01, tokens=1e5)
    assert step(64, costs, is_tree=True, size=1e8) < step(64, costs, size=1e8)


def test_a_step_ahead_hides_most_of_what_stragglers_cost_and_nothing_else() -> None:
    costs = replace(COSTS, samplings=UNEVEN)
    lost, lost_ahead = step(4, costs) - 2.5, step(4, costs, is_ahead=True) - 2.5
    assert 0 < lost_ahead < lost / 4
    assert step(4, is_ahead=True) == pytest.approx(2.5)


def test_a_ring_moves_nearly_twice_the_vector_whatever_its_size() -> None:
    assert step(8, size=3e9) - step(8) == pytest.approx(2 * 7 / 8 * 3e9 / CLUSTER.nvlink)


def test_short_rows_shorten_a_step_and_the_longest_ends_it() -> None:
    costs = replace(COSTS, tokens=128 * 256.0, floor=1.0)
    assert 2.4 < step(1, replace(costs, shortest=16.0)) < step(1, costs)
    assert step(1, replace(costs, shortest=16.0, floor=0.0)) < 0.6 * step(1, costs)


def test_costs_are_what_a_run_of_one_tells() -> None:
    costs = calibrated(rows(1, **{"seconds/update": 0.55}), 256.0)
    assert (costs.samplings, costs.update, costs.tokens) == ([2.0] * 6, 0.5, 100.0)
    assert (costs.host, costs.rest) == pytest.approx((0.05, 0.05))


def test_uneven_steps_of_one_worker_tell_what_two_lose() -> None:
    even, uneven = (
        [row | {"seconds/rollout": seconds} for row, seconds in zip(rows(1), given, strict=True)]
        for given in ((2.0,) * 6, (1.8, 2.2) * 3)
    )
    assert predicted_efficiency(even, 2, row_tokens=256.0) == pytest.approx(1, abs=1e-3)
    assert predicted_efficiency(uneven, 2, row_tokens=256.0) == pytest.approx(2.6 / 2.7, abs=0.01)


def test_the_script_compares_its_predictions_with_what_was_measured(tmp_path: Path) -> None:
    for workers in (1, 2):
        (tmp_path / f"{workers}.jsonl").write_text("\n".join(map(json.dumps, rows(workers))))
    command = [sys.executable, str(ROOT / "scripts" / "simulate_steps.py"), "1.jsonl", "2.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "2 workers: step 2.600 s, predicted 2.600; efficiency 1.000, predicted 1.000" in done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (rows(1)[:1], "fewer than 2 steps"),
        (rows(2, **{"exchange/wait_seconds": 0.0}), "must be one of a single worker"),
        (rows(1, **{"offpolicy/lag_max": 1}), "without steps sampled ahead"),
    ],
)
def test_a_run_that_tells_no_costs_is_named(given: list[dict[str, float]], expected: str, tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, given)))
    command = [sys.executable, str(ROOT / "scripts" / "simulate_steps.py"), "1.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "1.jsonl" in done.stderr
    assert expected in done.stderr
