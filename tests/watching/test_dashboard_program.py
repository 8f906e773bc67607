"""`python -m parallm.dashboard`: finished runs without a model."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from parallm import dashboard
from parallm.server.settings import ServerSettings
from tests.server.conftest import send_to
from tests.watching.conftest import row

RUN = "sums~2026-01-31_22-04-10"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / RUN.replace("~", "/")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2)))
    (folder / "config.yaml").write_text("trainer:\n  steps: 2\n")
    return tmp_path


def test_runs_are_read_and_nothing_else_is_there(runs: Path) -> None:
    app = dashboard.create_app(ServerSettings(), [runs])
    session = send_to(app, "GET", "/v1/session").json()
    assert (session["serves"], session["trains"], session["run"]) == (False, [], None)
    assert [run["id"] for run in send_to(app, "GET", "/v1/runs").json()["data"]] == [RUN]
    assert send_to(app, "GET", f"/v1/runs/{RUN}/history").json()["last"] == 2
    assert send_to(app, "GET", "/dashboard/").headers["content-security-policy"]
    for path in ("/v1/chat/completions", "/v1/training/pause", "/v1/runs/current/history"):
        assert send_to(app, "GET", path).status_code == 404, path
    assert send_to(app, "GET", "/v1/runs", headers={"Host": "evil.example"}).status_code == 403


def test_the_program_says_its_address_serves_and_ends_with_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "parallm.dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        address = program.stdout.readline().split("dashboard/")[0]
        try:
            with httpx.stream("GET", f"{address}v1/runs", timeout=30) as answer:
                assert answer.status_code == 200
            program.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert program.wait(20) == 0
            assert time.monotonic() - began < 10
        finally:
            program.kill()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dashboard.main([str(tmp_path / "nowhere")])
    assert "nowhere is no folder; name a folder of runs, such as checkpoints, or one run" in capsys.readouterr().err
