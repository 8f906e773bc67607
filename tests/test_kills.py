"""The account of `scripts/check_kills.py`, at a size that a test can take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_nothing_that_a_person_gave_is_lost_when_the_process_is_killed_and_the_controls_lose_some() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "check_kills.py"), "--kills=3", "--serve-kills=2"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    for name in ("live.ratings_lost", "live.trained_twice", "live.wrong_answers", "serve.wrong_states"):
        assert figures[name] == 0, done.stdout
    for name in ("live.ratings", "live.control_lost", "live.control_twice", "serve.control_wrong_states"):
        assert figures[name] > 0, done.stdout
