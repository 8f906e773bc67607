"""Is it seen what a run has lost? With files that somebody has damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROBE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from check_hostile import left_in

print(json.dumps(asdict(left_in(Path(sys.argv[2])))))
"""


def lines_of(*steps: int) -> list[str]:
    return [json.dumps({"step": step, "guard/skipped": step // 4}) for step in steps]


@pytest.mark.parametrize(
    ("rows", "sampled", "rows_lost"),
    [
        (lines_of(1, 2, 3, 4), lines_of(1, 1, 2, 3, 4), 0),
        (lines_of(1, 2, 4), lines_of(1, 2, 4), 1),
        (lines_of(1, 2, 3, 3), lines_of(1, 2, 3), 1),
        ([*lines_of(1, 2), "", *lines_of(3)], lines_of(1, 2, 3), 1),
        ([*lines_of(1, 2), '{"step": 3, "rew'], lines_of(1, 2, 3), 1),
        (lines_of(1, 2, 3, 4), lines_of(1, 2, 4), 1),
    ],
    ids=["nothing", "a step", "a step twice", "an empty line", "half a line", "samples"],
)
def test_rows_that_are_lost_are_counted(tmp_path: Path, rows: list[str], sampled: list[str], rows_lost: int) -> None:
    run = tmp_path / "checkpoints" / "hostile" / "time" / "math"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (run / "samples.jsonl").write_text("\n".join(sampled) + "\n")
    (tmp_path / "run.log").write_text("step 3: rolled back from version 3\nthe checkpoint could not be saved: full\n")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(SCRIPTS), str(tmp_path)], capture_output=True, text=True, check=True
    )
    left = json.loads(done.stdout)
    assert (left["rows_lost"], left["rolled_back"], left["checkpoints_failed"]) == (rows_lost, 1, 1)
