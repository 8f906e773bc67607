"""Files, batches and fine-tuning jobs over HTTP: forms, owners, refusals, and answers behind those of clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.jobs.jobs import Jobs, open_jobs
from parallm.jobs.settings import JobSettings
from parallm.server.jobs.routes_batches import asking
from parallm.server.operation.auth import StoredKey
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app, send_to

KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob", "root")}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "base", "prompt": "hello"}}
FORM = {"purpose": "batch"}
PART = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)
END = b"\r\n--x--\r\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with open_jobs(JobSettings(enabled=True, max_file_bytes=2048), tmp_path / "jobs", base="nano") as jobs:
        yield jobs


@pytest.fixture
def with_jobs(engine: EchoEngine, tokenizer: CharacterTokenizer, jobs: Jobs) -> FastAPI:
    return make_app(engine, tokenizer, jobs=jobs)


def upload(app: FastAPI, content: bytes = b"text", data: dict[str, str] = FORM, **options: Any) -> httpx.Response:
    return send_to(app, "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data=data, **options)


def test_without_jobs_the_routes_say_how_to_have_them(call: Callable[..., httpx.Response]) -> None:
    response = call("GET", "/v1/files")
    assert response.status_code == 409
    assert "jobs.enabled=true" in response.json()["error"]["message"]


def test_a_file_comes_back_as_it_was(with_jobs: FastAPI) -> None:
    content = bytes(range(256)) * 4
    made = upload(with_jobs, content, FORM | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    file = made.json()
    assert (file["object"], file["bytes"], file["filename"], file["status"]) == ("file", 1024, "in.jsonl", "processed")
    assert file["expires_at"] == file["created_at"] + 3600
    assert send_to(with_jobs, "GET", f"/v1/files/{file['id']}/content").content == content
    assert send_to(with_jobs, "GET", f"/v1/files/{file['id']}").json() == file
    assert send_to(with_jobs, "GET", "/v1/files?purpose=batch&limit=1&order=asc").json()["data"] == [file]
    deleted = send_to(with_jobs, "DELETE", f"/v1/files/{file['id']}").json()
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
    assert send_to(with_jobs, "GET", f"/v1/files/{file['id']}/content").status_code == 404


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "vision"}, "purpose"),
        (FORM | {"expires_after[seconds]": "3600"}, "expires_after"),
        (FORM | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "-1"}, "expires_after"),
        (FORM | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}, "expires_after"),
        (FORM | {"color": "red"}, "color"),
    ],
)
def test_wrong_forms_are_refused_by_name(with_jobs: FastAPI, data: dict[str, str], param: str) -> None:
    response = upload(with_jobs, data=data)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert send_to(with_jobs, "GET", "/v1/files").json()["data"] == []


def test_files_and_bodies_beyond_the_cap_are_refused(with_jobs: FastAPI) -> None:
    assert upload(with_jobs, b"a" * 2049).status_code == 413
    assert upload(with_jobs, b"a" * 200_000).json()["error"]["message"].endswith("raise jobs.max_file_bytes")
    assert send_to(with_jobs, "POST", "/v1/files", json={}).status_code == 400
    assert send_to(with_jobs, "POST", "/v1/files", data=FORM, files={"text": ("a", b"a")}).status_code == 400


def test_files_that_come_at_once_have_a_limit_together(
    engine: EchoEngine, tokenizer: CharacterTokenizer, tmp_path: Path
) -> None:
    settings = JobSettings(enabled=True, max_file_bytes=500_000, max_stored_bytes=600_000)

    async def main(app: FastAPI) -> list[int]:
        is_under_way, goes_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield PART + bytes(400_000)
            is_under_way.set()
            await goes_on.wait()
            yield END

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            post = partial(client.post, "/v1/files", headers={"content-type": "multipart/form-data; boundary=x"})
            first = asyncio.create_task(post(content=slow()))
            await is_under_way.wait()
            whole = PART + bytes(400_000) + END
            second = await post(content=whole)
            goes_on.set()
            stored, third = await first, await post(content=whole)
            await client.delete(f"/v1/files/{stored.json()['id']}")
            return [answer.status_code for answer in (stored, second, third, await post(content=whole))]

    with open_jobs(settings, tmp_path / "jobs", base="nano") as jobs:
        assert asyncio.run(main(make_app(engine, tokenizer, jobs=jobs))) == [200, 429, 413, 200]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=10001", "order=up", "color=red"])
def test_wrong_questions_are_refused(with_jobs: FastAPI, query: str) -> None:
    response = send_to(with_jobs, "GET", f"/v1/files?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_each_key_has_files_of_its_own(engine: EchoEngine, tokenizer: CharacterTokenizer, jobs: Jobs) -> None:
    keys = tuple(
        StoredKey(name, "admin" if name == "root" else "inference", sha256(key.encode()).digest())
        for name, key in KEYS.items()
    )
    app = make_app(engine, tokenizer, jobs=jobs, keys=keys)
    headers = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    path = f"/v1/files/{upload(app, headers=headers['ann']).json()['id']}"
    assert upload(app).status_code == 401
    assert [send_to(app, "GET", path, headers=headers[name]).status_code for name in KEYS] == [200, 404, 200]
    assert [len(send_to(app, "GET", "/v1/files", headers=headers[name]).json()["data"]) for name in KEYS] == [1, 0, 1]
    batch = {"input_file_id": path.rpartition("/")[2], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert send_to(app, "POST", "/v1/batches", headers=headers["bob"], json=batch).status_code == 404
    made = send_to(app, "POST", "/v1/batches", headers=headers["ann"], json=batch).json()
    cancel = f"/v1/batches/{made['id']}/cancel"
    assert [send_to(app, "POST", cancel, headers=headers[name]).status_code for name in ("bob", "ann")] == [404, 200]


def batch_of(app: FastAPI, jobs: Jobs, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of both files after a batch of these rows."""
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    body = {
        "input_file_id": upload(app, content).json()["id"],
        "endpoint": rows[0]["url"],
        "completion_window": "24h",
    }
    name = send_to(app, "POST", "/v1/batches", json=body).json()["id"]

    async def until_over() -> None:
        running = asyncio.create_task(jobs.batches.run(asking(app)))
        while jobs.batches.get(name, None).status not in ("completed", "failed"):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(until_over())
    batch = send_to(app, "GET", f"/v1/batches/{name}").json()
    files = [batch[key] for key in ("output_file_id", "error_file_id") if batch[key]]
    texts = [send_to(app, "GET", f"/v1/files/{file}/content").text for file in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_a_batch_has_the_answers_of_http_behind_those_of_clients(
    with_jobs: FastAPI, jobs: Jobs, engine: EchoEngine
) -> None:
    answer = send_to(with_jobs, "POST", "/v1/completions", json=LINE["body"]).json()
    (row,) = batch_of(with_jobs, jobs, LINE)
    assert row["response"]["body"]["choices"] == answer["choices"]
    assert row["response"]["request_id"]
    assert [request.traffic for request in engine.requests] == ["serving", "rollout"]
    send_to(with_jobs, "POST", "/v1/completions", json=LINE["body"])
    assert engine.requests[-1].traffic == "serving"


def test_a_refused_request_is_a_line_of_the_error_file(with_jobs: FastAPI, jobs: Jobs) -> None:
    (row,) = batch_of(with_jobs, jobs, {**LINE, "body": {"model": "nope", "prompt": "a"}})
    assert (row["custom_id"], row["response"]["status_code"]) == ("a", 404)
    assert row["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("field", ["completion_window", "endpoint", "input_file_id", "metadata", "color"])
def test_wrong_batches_are_refused_by_name(with_jobs: FastAPI, field: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", field: 5}
    response = send_to(with_jobs, "POST", "/v1/batches", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


JOB = {"model": "base", "training_file": "file-none"}
STRINGS = {"type": "string_check", "input": "a", "operation": "eq", "reference": "b"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 404, "id"),
        ({"training_file": ""}, 400, "training_file"),
        ({"model": "nope"}, 404, "model"),
        ({"method": {"type": "dpo", "dpo": {}}}, 400, "method"),
        ({"method": {"type": "dpo"}}, 400, "method.type"),
        ({"method": {"type": "reinforcement"}}, 400, "method.reinforcement"),
        ({"method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "python"}}}}, 400, "method."),
        ({"method": {"type": "supervised", "reinforcement": {"grader": STRINGS}}}, 400, "method.reinforcement"),
        ({"method": {"type": "supervised"}, "hyperparameters": {"n_epochs": 1}}, 400, "hyperparameters"),
        ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters"),
        ({"hyperparameters": {"compute_multiplier": 2}}, 400, "hyperparameters.compute_multiplier"),
        ({"suffix": "a/b"}, 400, "suffix"),
        ({"suffix": "a" * 65}, 400, "suffix"),
        ({"seed": -1}, 400, "seed"),
        ({"integrations": [{"type": "wandb"}]}, 400, "integrations"),
        ({"color": "red"}, 400, "color"),
    ],
)
def test_wrong_jobs_are_refused_by_name(with_jobs: FastAPI, fields: dict[str, Any], status: int, param: str) -> None:
    response = send_to(with_jobs, "POST", "/v1/fine_tuning/jobs", json=JOB | fields)
    error = response.json()["error"]
    assert (response.status_code, str(error["param"])[: len(param)]) == (status, param), error


def test_an_environment_is_named_and_brings_its_problems(with_jobs: FastAPI) -> None:
    def create(name: str, **fields: Any) -> httpx.Response:
        method = {"type": "reinforcement", "reinforcement": {"grader": {"type": "environment", "name": name}}}
        return send_to(with_jobs, "POST", "/v1/fine_tuning/jobs", json={"model": "base", "method": method, **fields})

    assert "arithmetic" in create("gsm8k").json()["error"]["message"]
    assert create("arithmetic", training_file="file-1").json()["error"]["param"] == "training_file"
    job = create("arithmetic", training_file="", integrations=[]).json()
    assert (job["status"], job["training_file"], job["hyperparameters"]["n_epochs"]) == ("validating_files", "", "auto")
    path = f"/v1/fine_tuning/jobs/{job['id']}"
    assert [event["message"] for event in send_to(with_jobs, "GET", f"{path}/events").json()["data"]] == [
        f"Created fine-tuning job: {job['id']}"
    ]
    assert send_to(with_jobs, "POST", f"{path}/resume").status_code == 400
    assert send_to(with_jobs, "POST", f"{path}/pause").json()["status"] == "paused"
    assert send_to(with_jobs, "POST", f"{path}/cancel").json()["status"] == "cancelled"
    assert send_to(with_jobs, "POST", f"{path}/cancel").status_code == 400
    assert send_to(with_jobs, "GET", "/v1/fine_tuning/jobs?limit=1").json()["data"][0]["id"] == job["id"]
