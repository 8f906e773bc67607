"""The benchmark of the engine on a GPU: does it run, and does a part that fails cost its own figures only?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import bench_engine_gpu, check_figures

figures = bench_engine_gpu.figures_of(json.loads(sys.argv[2]))
assert {name for name, _ in figures} <= check_figures.BARS.keys()
print(json.dumps({name: one.value for name, one in figures if one}))
"""


OURS = {"tokens": 800, "seconds": [2.0], "accepted": 0}
THEIRS = {"tokens": 800, "seconds": [5.0], "settings": {"rows": 64}}


def run(*command: str) -> Any:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def figures(found: dict[str, Any]) -> dict[str, float]:
    values: dict[str, float] = run("-c", PROBE, str(SCRIPTS), json.dumps(found))
    return values


def test_figures_are_ratios_of_medians() -> None:
    slower, plain = ({"step_seconds": [seconds], "host_seconds": [0.004]} for seconds in (0.01, 0.008))
    found = {
        "engine_shape.8b.b1": {
            "weight_bytes": 4_300_000_000,
            "step_seconds": [0.5, 0.002, 0.0015],
            "host_seconds": [0.001],
        },
        "engine_shape.8b.mixed": OURS,
        "batch_generator_shape.8b.mixed": THEIRS,
        "engine_shape.8b.lora": slower | {"plain": plain},
        "engine_shape.8b.sampling16": slower | {"plain": plain},
        "engine_shape.8b.join": {"plain_seconds": [0.004], "churn_seconds": [0.005], "changes": [0.5]},
        "engine_shape.05b.group": {"computed": 4096, "of_rows": 32768},
    }
    assert figures(found) == {
        "engine.gpu.8b.b1.vs_floor": 2.0,
        "engine.gpu.mixed.vs_batchgenerator": 2.5,
        "engine.gpu.8b.lora.vs_base": 0.8,
        "engine.sampling16.vs_greedy": 1.25,
        "engine.join.vs_step": 0.5,
        "engine.group.prompt_tokens_ratio": 0.125,
    }


def test_a_part_that_fails_costs_its_own_figure() -> None:
    found = {
        "engine_shape.05b.b1": OURS,
        "batch_generator_shape.05b.b1": {"error": "RuntimeError: out of memory"},
        "engine_shape.05b.group": {"computed": 1, "of_rows": 8},
    }
    assert figures(found) == {"engine.group.prompt_tokens_ratio": 0.125}


@pytest.mark.parametrize("ours", [OURS | {"accepted": 3}, OURS | {"tokens": 700}])
def test_sides_that_did_not_do_the_same_work_are_not_compared(ours: dict[str, Any]) -> None:
    found = {"engine_shape.8b.mixed": ours, "batch_generator_shape.8b.mixed": THEIRS}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        figures(found)
    assert "8b.mixed" in caught.value.stderr.splitlines()[-1]


def test_it_runs_on_a_cpu_and_keeps_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    script = str(SCRIPTS / "bench_engine_gpu.py")
    printed = run(script, "--quick", "--only", "8b.join", "05b.b1", "05b.group", "--out", str(out))["figures"]
    measured = json.loads(out.read_text())
    assert printed == measured["figures"]
    assert printed["engine.group.prompt_tokens_ratio"] == 0.125
    assert printed["engine.gpu.05b.b1.vs_batchgenerator"] > 0
    assert printed["engine.join.vs_step"] is not None
    assert printed["engine.gpu.8b.b1.vs_floor"] is None
    assert measured["found"]["engine_shape.05b.b1"]["tokens"] == 8
