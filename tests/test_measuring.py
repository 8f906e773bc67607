"""Do measuring scripts make of what they measured what their figures say? With made-up measurements."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def call(module: str, function: str, *arguments: object) -> Any:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); "
        f"import {module}; print(json.dumps({module}.{function}(*json.loads(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_is_judged_after_the_last_update_and_not_before_the_first() -> None:
    arrays = [100, 120, 150, 160, 160, 160]
    found = {"base": 1000, "adapter": 10, "arrays": arrays, "allocated": arrays, "resident": [300, *arrays[1:]]}
    figures = call("check_memory", "figures_of", found | {"peak": 400, "peak_of_updates": 900})
    assert figures["memory.learner_over_base"] == pytest.approx(0.06)
    assert figures["memory.learner_over_base_bar"] == pytest.approx(0.11)
    assert figures["memory.learner_adapters"] == 6
    assert figures["memory.growth_by_later_updates"] == 0
    assert figures["memory.update_peak_mb"] == pytest.approx(500 / 1e6)


def test_memory_that_grows_with_each_update_shows() -> None:
    sizes = [100, 110, 120, 130, 140, 150]
    found = {"base": 1000, "adapter": 10, "arrays": sizes, "allocated": sizes, "resident": sizes}
    figures = call("check_memory", "figures_of", found | {"peak": 400, "peak_of_updates": 900})
    assert figures["memory.growth_by_later_updates"] > 0.5


def test_a_publish_costs_what_the_next_first_token_takes_longer() -> None:
    without = [20.0] * 99 + [30.0]
    found = {"publish": [0.1] * 100, "to_first_token": [one + 4 for one in without], "without": without}
    figures = call("bench_serving", "publish_figures", found | {"finished": 8, "failed": 0, "tokens": 512})
    assert figures["publish.p50_ms"] == pytest.approx(4)
    assert figures["publish.p99_ms"] == pytest.approx(4)
    assert figures["publish.pointers_p99_ms"] == pytest.approx(0.1)


def test_a_publish_costs_no_less_at_worst_than_on_average() -> None:
    """However late a request without one was once."""
    found = {"publish": [0.1] * 9, "to_first_token": [40.0] * 9, "without": [20.0] * 8 + [500.0]}
    figures = call("bench_serving", "publish_figures", found | {"finished": 8, "failed": 0, "tokens": 512})
    assert figures["publish.p99_ms"] == pytest.approx(20)


def test_a_change_by_chance_has_an_interval_around_zero_and_one_by_learning_has_not() -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from changes import change, change_by_halves
same, more = change([0, 1] * 100, [1, 0] * 100), change_by_halves([0, 1] * 100 + [1, 1, 1, 0] * 50)
print(json.dumps([[one.gain, one.low, one.high] for one in (same, more)]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPTS)], capture_output=True, text=True, check=True)
    (gain, low, high), (learned, least, _) = json.loads(done.stdout)
    assert (gain, -low) == (0, high)
    assert high == pytest.approx(1.96 * 0.05, rel=0.01)
    assert learned == 0.25
    assert least > 0.1


def test_oracles_of_a_source_are_compared_case_by_case() -> None:
    kept = {"cases": [{"name": "grpo", "loss": 0.5, "gradient": [0.1, -0.2]}]}
    anew = {"cases": {"grpo": {"loss": 0.5, "gradient": [0.1, -0.25]}}}
    assert call("oracle_sources", "compared", kept, anew)["grpo"] == pytest.approx([0, 0.05])
    with pytest.raises(subprocess.CalledProcessError):
        call("oracle_sources", "compared", kept, {"cases": {}})


def test_steps_are_compared_by_the_seconds_of_a_token_that_is_sampled_and_trained_on() -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from bench_learner import Steps, slower_per_token
ours, other = Steps(), Steps()
ours.add({"seconds": [10.0], "rollout": [6.0], "tokens": [600], "trained": [400]})
other.add({"seconds": [20.0], "rollout": [6.0], "tokens": [300], "trained": [700]})
print(json.dumps(slower_per_token({"parallm": ours, "naive loop": other}, "naive loop")))
"""
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPTS)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pytest.approx((0.02 + 0.02) / (0.01 + 0.01))
