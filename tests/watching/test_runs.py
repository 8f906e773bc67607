"""The routes of runs: the one in training and those on the disk answer alike."""

import asyncio
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from parallm.metrics import run_files
from parallm.metrics.live_run import LiveRun
from parallm.metrics.run_files import RunFolder
from parallm.metrics.run_folders import RunFolders
from parallm.metrics.watching import Watching
from parallm.reports import TrainingStatus
from tests.server.conftest import send_to
from tests.watching.conftest import application, row, served

OLD, NEW = "sums~2026-01-30_08-00-00", "sums~2026-01-31_22-04-10"
FILES = {
    "config.yaml": "name: sums\nlearner:\n  learning_rate: 0.0004\ntrainer:\n  steps: 9\n",
    "evaluations.jsonl": '{"step": 2, "time": 5.5, "heldout/accuracy": 0.5}\n',
    "happenings.jsonl": '{"step": 1, "kind": "saved", "time": 1}\n{"step": 2, "kind": "evaluated", "time": 2}\n',
    "summary.json": json.dumps({"figures": {"sums.accuracy_best": 0.5}, "machine": "a machine", "commit": "abc"}),
    "run.log": "2026-01-30 08:00:01,000 INFO parallm.run: begun\n2026-01-30 08:00:02,000 WARNING parallm.guard: low\n",
}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    """The second of two runs on the disk is in training, at its third step."""
    for run in (OLD, NEW):
        folder = tmp_path / run.replace("~", "/")
        (folder / "step_000002").mkdir(parents=True)
        (folder / "step_000002" / "state.json").write_text("12")
        (folder / "faults").mkdir()
        fault = {
            "step": 2,
            "fault": "score_raised",
            "reason": "KeyError",
            "problem_id": "p",
            "text": "</script>",
            "tokens": [1],
        }
        (folder / "faults" / "step_2.jsonl").write_text(json.dumps(fault) + "\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2)))
        for name, text in FILES.items():
            (folder / name).write_text(text)
    watching = Watching(run_id=NEW, folders=RunFolders([tmp_path]))
    live = LiveRun("policy", watching.news, None)
    live.load(tmp_path / NEW.replace("~", "/"))
    live.status = lambda: TrainingStatus(state="updating", step=3, total_steps=9)
    live.step(row(3))
    watching.runs = {"policy": live}
    return application(watching)


def get(app: FastAPI, path: str) -> Any:
    answer = send_to(app, "GET", path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_has_the_state_of_the_run_in_training(app: FastAPI) -> None:
    found = get(app, "/v1/runs")
    assert found["after"] is None
    assert [(run["id"], run["state"], run["step"], run["total_steps"], run["is_current"]) for run in found["data"]] == [
        (NEW, "running", 3, 9, True),
        (OLD, "stopped", 2, 9, False),
    ]
    first = get(app, "/v1/runs?limit=1")
    assert (len(first["data"]), first["after"]) == (1, NEW)
    assert [run["id"] for run in get(app, f"/v1/runs?limit=1&after={NEW}")["data"]] == [OLD]


@pytest.mark.parametrize("run", [OLD, NEW, "current"])
def test_every_run_answers_every_question(app: FastAPI, run: str) -> None:
    is_live = run != OLD
    one = get(app, f"/v1/runs/{run}")
    assert (one["id"], one["machine"], one["commit"]) == (NEW if is_live else OLD, "a machine", "abc")
    assert one["columns"] == ["time", "reward/mean"]
    assert {"name": "config.yaml", "bytes": len(FILES["config.yaml"])} in one["files"]
    assert get(app, f"/v1/runs/{run}/config")["values"]["learner.learning_rate"] == 0.0004
    assert get(app, f"/v1/runs/{run}/history")["starts"] == ([1, 2, 3] if is_live else [1, 2])
    assert get(app, f"/v1/runs/{run}/evaluations")["data"][0]["heldout/accuracy"] == 0.5
    assert [one["kind"] for one in get(app, f"/v1/runs/{run}/happenings")["data"]] == ["saved", "evaluated"]
    assert [one["kind"] for one in get(app, f"/v1/runs/{run}/happenings?limit=1")["data"]] == ["evaluated"]
    (checkpoint,) = get(app, f"/v1/runs/{run}/checkpoints")["data"]
    assert (checkpoint["step"], checkpoint["bytes"]) == (2, 2)
    (fault,) = get(app, f"/v1/runs/{run}/faults")["data"]
    assert (fault["step"], fault["kind"], fault["text"]) == (2, "score_raised", "KeyError")
    assert get(app, f"/v1/runs/{run}/faults/2")["data"][0]["text"] == "</script>"


def test_the_log_of_a_run_on_the_disk_is_that_of_its_file(app: FastAPI) -> None:
    assert [line["text"] for line in get(app, f"/v1/runs/{OLD}/log")["data"]] == ["begun", "low"]
    assert [line["text"] for line in get(app, f"/v1/runs/{OLD}/log?level=warning")["data"]] == ["low"]
    assert [line["text"] for line in get(app, f"/v1/runs/{OLD}/log?search=BEG")["data"]] == ["begun"]
    assert get(app, "/v1/runs/current/log")["data"] == []


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/runs/nope~1", 404, "no run 'nope~1'; GET /v1/runs lists those that can be read"),
        ("/v1/runs/%2e%2e%2fetc/config", 404, "no"),
        (f"/v1/runs/{OLD}?policy=poet", 404, "has no policy 'poet'; it has policy"),
        (f"/v1/runs/{OLD}/history?points=0", 400, "points=0 should be from 1 to 2048"),
        (f"/v1/runs/{OLD}/log?level=loud", 400, "level='loud' should be one of DEBUG, INFO"),
        (f"/v1/runs/{OLD}/log?limit=0", 400, "limit=0 should be from 1 to 5000"),
        (f"/v1/runs/{OLD}/faults/9", 404, "step 9 of run"),
        ("/v1/runs?after=nope", 404, "no run 'nope' after which others come"),
    ],
)
def test_wrong_questions_are_answered_with_the_way_out(app: FastAPI, path: str, status: int, text: str) -> None:
    answer = send_to(app, "GET", path)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_a_hostile_configuration_is_an_error_that_names_the_limit(app: FastAPI, tmp_path: Path) -> None:
    (tmp_path / OLD.replace("~", "/") / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    answer = send_to(app, "GET", f"/v1/runs/{OLD}/config")
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "run_unreadable"
    assert "has aliases" in answer.json()["error"]["message"]
    assert [run["id"] for run in get(app, "/v1/runs")["data"]] == [NEW, OLD]


@pytest.fixture
def large_run(tmp_path: Path) -> Path:
    """The file of metrics that the older run has: 8 MiB, rows of 42 numbers."""
    file = tmp_path / OLD.replace("~", "/") / "metrics.jsonl"
    lines = (json.dumps(row(step, **{f"m/{name}": step / 7 for name in range(42)})) for step in range(1, 8_001))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))
    return file


async def longest_wait(app: FastAPI) -> float:
    """Of an event loop that has something to do each millisecond, over the time of an answer with a history."""
    async with served(app) as client:
        await client.get("/v1/session")
        start = time.perf_counter()
        reading, longest = asyncio.create_task(client.get(f"/v1/runs/{OLD}/history")), 0.0
        while not reading.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began)
        assert (await reading).json()["last"] == 8_000
        return longest / (time.perf_counter() - start)


@pytest.mark.usefixtures("no_collections")
def test_a_large_run_on_the_disk_keeps_no_request_waiting(app: FastAPI, large_run: Path) -> None:
    waits = []
    for number in range(8):  # one of eight: a processor that others share may be taken away in the middle of a turn
        os.utime(large_run, (number, number))  # it was not read before
        waits.append(asyncio.run(longest_wait(app)))
        if waits[-1] <= 0.1:
            break
    assert min(waits) <= 0.1


def test_a_large_file_is_read_in_large_blocks(large_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []

    class Raw(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            blocks.append(super().readinto(buffer))
            return blocks[-1]

    monkeypatch.setattr(
        os, "fdopen", lambda number, mode, size=io.DEFAULT_BUFFER_SIZE: io.BufferedReader(Raw(number, mode), size)
    )
    assert len(list(run_files.rows_of(RunFolder(large_run.parent), "metrics.jsonl"))) == 8_000
    assert sum(blocks) == large_run.stat().st_size
    assert len(blocks) <= -(-sum(blocks) // 2**20) + 2  # the last ones find the end
