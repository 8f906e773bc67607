"""Do both sides of the engine's comparison do the same work, and does the peer get the settings that suit it best?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"
LOADS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import engine_loads

engine_loads.COMPARED, engine_loads.ALONE = ("b1", "groups"), ()
job = replace(engine_loads.LOADS, shape="tiny", new=16, group_prompt=32, speculation=sys.argv[2])
print(json.dumps(engine_loads.measure_loads(job, 1)))
"""
TUNE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tuning import tune

asked = []

def seconds_of(settings):
    asked.append(settings)
    return None if settings["rows"] == 8 else abs(settings["rows"] - 4) + abs(settings["chunk"] - 10 * settings["rows"])

trials = tune({"rows": 1, "chunk": 10}, {"rows": (1, 2, 4, 8), "chunk": (20, 40)}, seconds_of)
print(json.dumps({"asked": asked, "trials": [[one.settings, one.seconds] for one in trials]}))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(SCRIPTS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_load_has_a_figure_where_each_token_took_a_forward() -> None:
    done = run(LOADS, "none")
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == {"engine.cpu.load.b1.vs_batchgenerator", "engine.cpu.load.groups.vs_batchgenerator"}
    assert min(figures.values()) > 0
    assert "copies" in done.stdout


def test_a_side_that_guesses_tokens_is_not_compared() -> None:
    done = run(LOADS, "ngram")
    assert done.returncode != 0
    assert "tokens of ours were guessed" in done.stderr.splitlines()[-1]


def test_settings_are_tried_one_after_the_other_beside_the_best_of_the_others() -> None:
    found: dict[str, Any] = json.loads(run(TUNE).stdout)
    pairs = [(one["rows"], one["chunk"]) for one in found["asked"]]
    assert pairs == [(1, 10), (2, 10), (4, 10), (8, 10), (1, 20), (1, 40)]
    assert found["trials"][0] == [{"rows": 1, "chunk": 10}, 3]
    assert found["trials"][-1] == [{"rows": 8, "chunk": 10}, None]
