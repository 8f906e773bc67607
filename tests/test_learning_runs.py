"""Does the measurement of the presets count what it says? With made-up training runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# The real measurement with runs whose held-out accuracies are given, four steps between two of them.
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import learning_runs

ACCURACIES = json.loads(sys.argv[2])

def made_up(preset, seed, target, *overrides):
    accuracies = [0.3, 0.3] if "learner.learning_rate=0" in overrides else ACCURACIES[preset][seed]
    return learning_runs.Run(
        preset=preset,
        seed=seed,
        target=target,
        evaluations=[{"step": 4 * place, "heldout/accuracy": one} for place, one in enumerate(accuracies)],
        steps=[{"groups/sampled": 16, "seconds/total": 0.5}] * 12,
        group_size=8,
    )

learning_runs.trained = made_up
figures = learning_runs.check_presets(list(ACCURACIES), 2)
print(json.dumps({"figures": figures, "targets": sorted(learning_runs.TARGETS)}))
"""


def measure(accuracies: dict[str, list[list[float]]]) -> tuple[dict[str, Any], list[list[str]]]:
    """The last line, parsed, and the words of the table's rows."""
    command = [sys.executable, "-c", PROBE, str(ROOT / "scripts"), json.dumps(accuracies)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return json.loads(lines[-1]), [line.split() for line in lines if line.startswith("  ")][1:]


def test_a_preset_counts_as_reached_if_every_seed_gets_there() -> None:
    found, table = measure({"grpo": [[0.3, 0.6, 0.9], [0.3, 0.85]], "sapo": [[0.3, 0.9], [0.3, 0.5, 0.84]]})
    assert found["figures"] == {
        "presets.reached": 1,
        "presets.total": 2,
        "presets.worst_accuracy": 0.84,
        "presets.control_accuracy": 0.3,
    }
    assert [row[0] for row in table] == ["grpo", "grpo", "sapo", "sapo", "grpo,"]
    assert table[3][5:] == ["30.0%", "84.0%", "not", "reached", "-", "6"]


def test_only_steps_up_to_the_target_are_counted() -> None:
    _, table = measure({"grpo": [[0.3, 0.6, 0.9], [0.3, 0.85]]})
    assert table[0] == ["grpo", "0", "85%", "in", "60", "30.0%", "90.0%", "8", "1024", "4"]
    assert table[1] == ["grpo", "1", "85%", "in", "60", "30.0%", "85.0%", "4", "512", "2"]


def test_every_preset_of_the_menu_that_samples_has_a_target() -> None:
    menu = {file.stem for file in (ROOT / "conf" / "learner").glob("*.yaml")}
    found, _ = measure({"grpo": [[0.3, 0.9], [0.3, 0.9]]})
    assert menu - {"sft", "reward_model"} == set(found["targets"])
