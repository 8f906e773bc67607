"""Is it seen what a run has lost? With files that somebody has damaged."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROBE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from check_hostile import left_in

print(json.dumps([asdict(left_in(Path(folder))) for folder in sys.argv[2:]]))
"""


def lines_of(*steps: int) -> list[str]:
    return [json.dumps({"step": step}) for step in steps]


CASES: dict[str, tuple[list[str], list[str], int]] = {
    "nothing": (lines_of(1, 2, 3, 4), lines_of(1, 1, 2, 3, 4), 0),
    "a step": (lines_of(1, 2, 4), lines_of(1, 2, 4), 1),
    "a step twice": (lines_of(1, 2, 3, 3), lines_of(1, 2, 3), 1),
    "an empty line": ([*lines_of(1, 2), "", *lines_of(3)], lines_of(1, 2, 3), 1),
    "half a line": ([*lines_of(1, 2), '{"step": 3, "rew'], lines_of(1, 2, 3), 1),
    "samples": (lines_of(1, 2, 3, 4), lines_of(1, 2, 4), 1),
}


def test_rows_that_are_lost_are_counted(tmp_path: Path) -> None:
    for name, (rows, sampled, _) in CASES.items():
        run = tmp_path / name / "checkpoints" / "hostile" / "time" / "math"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        (run / "samples.jsonl").write_text("\n".join(sampled) + "\n")
        (tmp_path / name / "run.log").write_text("rolled back from version 3\nthe checkpoint could not be saved\n")
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), *(str(tmp_path / name) for name in CASES)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    lost = [(left["rows_lost"], left["rolled_back"], left["checkpoints_failed"]) for left in found]
    assert lost == [(rows_lost, 1, 1) for _, _, rows_lost in CASES.values()]
