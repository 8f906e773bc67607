"""Live traffic from end to end, at a size that a test can take: clients, late rewards, a policy that gets better."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_late_rewards_of_clients_make_the_policy_better_and_without_learning_they_do_not() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "check_live.py"), "--completions=120"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["live.reward_gain"] > 0.1
    assert abs(figures["live.control_gain"]) < 0.05
    assert figures["live.failed_requests"] == 0
