"""A policy net learns CartPole through the service, with versions published while clients act."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import ROOT, last_json, run_program, running

SECONDS = 170.0


def learn(url: str, *options: str) -> dict[str, Any]:
    return last_json(run_program([sys.executable, str(ROOT / "scripts" / "cartpole.py"), url, *options]))


@pytest.mark.learning
def test_a_cart_keeps_its_pole_up(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("gymnasium")
    settings = ["model=nano", "server.state=off"]
    with running("parallm.serve", settings, tmp_path) as server:
        learned = learn(server.url, f"--seconds={SECONDS}", f"--updates={request_of_tests().size(1000, 5)}")
        still = learn(server.url, "--name=still", "--learning-rate=0", f"--updates={request_of_tests().size(30, 2)}")
    record_property("tasks.cartpole_before", learned["before"])
    record_property("tasks.cartpole_return", learned["return"])
    record_property("tasks.cartpole_seconds", learned["seconds"])
    record_property("tasks.cartpole_versions", learned["versions"])
    record_property("tasks.cartpole_control_gain", still["return"] - still["before"])
