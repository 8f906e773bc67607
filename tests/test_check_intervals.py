"""The check of the printed intervals: ours hold the truth and are not too wide, and the normal one fails it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_intervals.py"


def test_intervals_hold_the_truth_and_the_normal_one_does_not() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["intervals.worst_coverage"] >= 0.93
    assert figures["intervals.worst_width_ratio"] <= 1.3
    assert figures["intervals.one_way_coverage"] >= 0.91
    assert figures["intervals.control_coverage"] < 0.5
