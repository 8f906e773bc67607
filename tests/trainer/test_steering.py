"""What a client may do to a run over HTTP, with the files that it leaves."""

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.trainer.test_runs import rows_of

Train = Callable[..., int]
HELD_OUT = {"steps": 1000, "evaluate_problems": 4}


def status(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/v1/training/status").json()
    return answer


def test_an_evaluation_on_request_is_of_the_newest_version_and_made_once(
    run_with_client: Train, tmp_path: Path
) -> None:
    def act(client: httpx.Client) -> None:
        client.post("/v1/training/update").raise_for_status()
        first = client.post("/v1/training/evaluate", json={"policy": "policy"}).json()["evaluations"]["policy"]
        now = status(client)
        assert (first["step"], first["heldout/version"], now["state"]) == (now["step"], now["version"], "paused")
        assert client.post("/v1/training/evaluate").json()["evaluations"]["policy"] == first
        assert client.post("/v1/training/evaluate", json={"policy": "poet"}).status_code == 404

    assert run_with_client(act, trainer=HELD_OUT) == 0
    assert len(rows_of(tmp_path / "run", "evaluations.jsonl")) == 2  # with that before the first step


def test_evaluations_on_request_cost_no_patience(run_with_client: Train) -> None:
    def act(client: httpx.Client) -> None:
        for _ in range(4):
            client.post("/v1/training/update").raise_for_status()
            client.post("/v1/training/evaluate").raise_for_status()
        assert status(client)["step"] >= 4

    patient = HELD_OUT | {"evaluate_every": 500, "patience": 1}
    assert run_with_client(act, trainer=patient, learner={"learning_rate": 1e-9}) == 0


def test_a_run_without_held_out_problems_says_how_to_have_some(run_with_client: Train) -> None:
    def act(client: httpx.Client) -> None:
        answer = client.post("/v1/training/evaluate")
        assert answer.status_code == 409
        assert "trainer.evaluate_problems" in answer.json()["error"]["message"]

    run_with_client(act, trainer={"steps": 1000, "evaluate_problems": 0})


def test_training_that_a_client_stops_is_saved_and_its_versions_are_served_on(
    run_with_client: Train, tmp_path: Path
) -> None:
    def act(client: httpx.Client) -> None:
        stepped = client.post("/v1/training/update").json()["step"]
        stopped = client.post("/v1/training/stop").json()
        assert (stopped["state"], stopped["training_enabled"], stopped["step"]) == ("finished", False, stepped)
        assert [path.name for path in (tmp_path / "run").glob("step_*")] == [f"step_{stepped:06d}"]
        again = client.post("/v1/training/stop")
        assert (again.status_code, "training has ended" in again.json()["error"]["message"]) == (409, True)
        ends = time.monotonic() + 20
        while not (tmp_path / "run" / "adapter").is_dir() and time.monotonic() < ends:
            time.sleep(0.02)  # written after the trainers have ended
        answer = client.post("/v1/completions", json={"model": "policy", "prompt": "2", "max_tokens": 2}).json()
        assert answer["model"] == f"policy@{stopped['version']}"

    assert run_with_client(act, checkpoint={"every": 100}) == 0
    assert (tmp_path / "run" / "adapter").is_dir()
    noted = {row["kind"]: row for row in rows_of(tmp_path / "run", "happenings.jsonl")}
    assert {"stepped", "stopped", "finished", "refused"} <= noted.keys()
    assert (noted["stopped"]["refused"], noted["stopped"]["step"] > 0) == (None, True)
    assert "training has ended" in noted["refused"]["refused"]


def test_a_version_is_downloaded_and_comes_back_under_another_name(run_with_client: Train) -> None:
    def act(client: httpx.Client) -> None:
        client.post("/v1/training/update").raise_for_status()
        version = status(client)["version"]
        answer = client.get(f"/v1/adapters/policy@{version}/archive")
        assert answer.headers["content-type"] == "application/zip"
        assert answer.headers["content-disposition"] == f'attachment; filename="policy@{version}.zip"'
        assert "adapter_config.json" in zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
        digests = {card["id"]: card["digest"] for card in client.get("/v1/adapters").json()["data"]}
        copy = client.put("/v1/adapters/copy", content=answer.content).json()
        assert copy["digest"] == digests[f"policy@{version}"]
        assert client.get("/v1/adapters/poet/archive").status_code == 404
        assert client.get("/v1/adapters/base/archive").status_code == 400

    run_with_client(act)
