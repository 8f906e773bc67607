"""Fine-tuning jobs on the embedded model, over HTTP, in one process and in the next."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import parallm
from parallm.jobs.fine_tuning import FineTuning, Train
from parallm.jobs.job_rows import JobListener

SUMS = [(a, b) for a in range(1, 7) for b in range(1, 5)]
TRAINING = (
    "jobs.training={rollout: {max_tokens: 8, group_size: 4}, checkpoint: {every: 1}, trainer: {evaluate_problems: 4}}"
)
GRADER = {
    "type": "string_check",
    "name": "sum",
    "input": "{{sample.output_text}}",
    "operation": "like",
    "reference": "{{item.reference_answer}}",
}
OVER = ("succeeded", "failed", "cancelled")
SECONDS = 120.0


class Api:
    """The server over HTTP."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str) -> Any:
        return self._answer(self._http.get(path))

    def post(self, path: str, body: Any = None) -> Any:
        return self._answer(self._http.post(path, json=body or {}))

    def delete(self, path: str) -> Any:
        return self._answer(self._http.delete(path))

    def upload(self, rows: Sequence[Any]) -> str:
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        files = {"file": ("rows.jsonl", content)}
        name: str = self._answer(self._http.post("/v1/files", files=files, data={"purpose": "fine-tune"}))["id"]
        return name

    def create(self, **fields: Any) -> Any:
        return self.post("/v1/fine_tuning/jobs", {"model": "base", "seed": 1, **fields})

    def until(self, name: str, is_there: Callable[[Any], bool]) -> Any:
        until = time.monotonic() + SECONDS
        while not is_there(job := self.get(f"/v1/fine_tuning/jobs/{name}")):
            assert time.monotonic() < until, job
            time.sleep(0.02)
        return job

    def until_over(self, name: str) -> Any:
        return self.until(name, lambda job: job["status"] in OVER)

    def events(self, name: str) -> list[Any]:
        events: list[Any] = self.get(f"/v1/fine_tuning/jobs/{name}/events?limit=100")["data"]
        return events[::-1]

    def text(self, model: str) -> str:
        chat = {"model": model, "messages": [{"role": "user", "content": "2 + 3?"}], "temperature": 0, "max_tokens": 8}
        text: str = self.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        return text

    def steps(self, name: str) -> list[int]:
        """Return the steps of the events about steps."""
        return [event["data"]["step"] for event in self.events(name) if event["message"].startswith("Step ")]

    @staticmethod
    def _answer(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def serving(folder: Path) -> Iterator[Api]:
    overrides = ["jobs.enabled=true", f"jobs.folder={folder}/jobs", TRAINING, "server.state=off"]
    with (
        parallm.load(overrides=overrides) as model,
        model.serve(port=0) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as http,
    ):
        yield Api(http)


def demonstrations() -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"#### {a + b}"}]}
        for a, b in SUMS
    ]


def problems() -> list[Any]:
    return [{"messages": [{"role": "user", "content": f"{a} + {b}?"}], "reference_answer": a + b} for a, b in SUMS]


def reinforcement(grader: Any = GRADER, **hyperparameters: Any) -> Any:
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}}


def test_a_supervised_job_makes_a_model_that_the_next_process_serves(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        file = api.upload(demonstrations())
        job = api.create(
            training_file=file,
            validation_file=file,
            suffix="sums",
            metadata={"of": "me"},
            hyperparameters={"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 20.0},
        )
        assert (job["status"], job["fine_tuned_model"]) == ("validating_files", None)
        job = api.until_over(job["id"])
        assert (job["status"], job["error"], job["metadata"]) == ("succeeded", None, {"of": "me"})
        assert job["fine_tuned_model"].startswith("ft:nano:sums:")
        assert job["trained_tokens"] > 0
        assert api.steps(job["id"]) == [1, 2, 3, 4, 5, 6]
        losses = [
            event["data"]["valid_loss"] for event in api.events(job["id"]) if "valid_loss" in (event["data"] or {})
        ]
        assert losses[-1] < losses[0]
        (results,) = job["result_files"]
        assert api.get(f"/v1/files/{results}")["purpose"] == "fine-tune-results"
        checkpoints = api.get(f"/v1/fine_tuning/jobs/{job['id']}/checkpoints")["data"]
        assert [checkpoint["step_number"] for checkpoint in checkpoints] == [6, 5, 4]
        names = [job["fine_tuned_model"], *(one["fine_tuned_model_checkpoint"] for one in checkpoints)]
        texts = [api.text(name) for name in names]
        models = {name: api.get(f"/v1/models/{name}")["policy_version"] for name in names}
    with serving(tmp_path) as api:
        assert [api.text(name) for name in names] == texts
        assert {name: api.get(f"/v1/models/{name}")["policy_version"] for name in names} == models
        # its adapter can be trained further
        further = api.create(model=names[0], training_file=file, hyperparameters={"n_epochs": 1, "batch_size": 24})
        assert api.until_over(further["id"])["status"] == "succeeded"
        assert [api.text(name) for name in names] == texts
        assert api.delete(f"/v1/models/{names[0]}")["deleted"] is True
    with serving(tmp_path) as api:
        assert not any(model["id"].startswith(names[0]) for model in api.get("/v1/models")["data"])
        assert api.get(f"/v1/fine_tuning/jobs/{job['id']}")["status"] == "succeeded"


def after_step_two(monkeypatch: pytest.MonkeyPatch, act: Callable[[FineTuning, str], object]) -> None:
    """Call `act` once with a job, after the second step of the first job that gets there, before it begins another."""
    stepped, run, running, calls = JobListener.stepped, FineTuning.run, list[FineTuning](), list[str]()

    async def note_run(jobs: FineTuning, train: Train) -> None:
        running.append(jobs)
        await run(jobs, train)

    def note_step(listener: JobListener, row: Mapping[str, Any]) -> None:
        stepped(listener, row)
        if row["step"] == 2 and not calls:
            calls.append(listener._job_id)
            act(running[0], listener._job_id)

    monkeypatch.setattr(FineTuning, "run", note_run)
    monkeypatch.setattr(JobListener, "stepped", note_step)


def end(jobs: FineTuning, job: str) -> None:
    """Do what the end of a process does first."""
    assert jobs._running is not None
    jobs._is_closing = True
    jobs._running.stop.set()


def test_a_reinforcement_job_pauses_for_the_next_and_makes_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step_two(monkeypatch, lambda jobs, job: jobs.pause(job, None))
    with serving(tmp_path) as api:
        file = api.upload(problems())
        first = api.create(training_file=file, method=reinforcement(n_epochs=2, batch_size=8))["id"]
        second = api.create(method=reinforcement({"type": "environment", "name": "arithmetic"}, batch_size=8))["id"]
        api.until(second, lambda job: job["status"] == "running")
        assert (api.get(f"/v1/fine_tuning/jobs/{first}")["status"], api.steps(first)) == ("paused", [1, 2])
        assert api.post(f"/v1/fine_tuning/jobs/{second}/cancel")["status"] == "cancelled"
        api.post(f"/v1/fine_tuning/jobs/{first}/resume")
        job = api.until_over(first)
        assert (job["status"], api.steps(first)) == ("succeeded", [1, 2, 3, 4, 5, 6])
        assert job["hyperparameters"]["compute_multiplier"] == 1.0
        api.text(job["fine_tuned_model"])
        models = [model["id"] for model in api.get("/v1/models")["data"]]
        assert not any(second.partition("-")[2][:12] in model for model in models)
        rows = (tmp_path / "jobs" / "runs" / first / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_process_that_ends_in_a_job_leaves_it_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_step_two(monkeypatch, end)
    with serving(tmp_path) as api:
        file = api.upload(problems())
        job = api.create(training_file=file, method=reinforcement(n_epochs=3, batch_size=8))["id"]
        waiting = api.create(training_file=file, method=reinforcement(n_epochs=1, batch_size=24))["id"]
        api.until(job, lambda job: api.steps(job["id"]) == [1, 2])
    with serving(tmp_path) as api:
        done = api.until_over(job)
        assert (done["status"], api.steps(job)) == ("succeeded", list(range(1, 10)))
        assert "The job goes on after step 2" in [event["message"] for event in api.events(job)]
        assert api.until_over(waiting)["status"] == "succeeded"


def test_files_that_cannot_be_learned_from_fail_their_job_by_line(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        right = api.upload(problems())
        wrong = api.upload([*problems(), {"messages": [{"role": "user", "content": "2?"}]}])
        jobs = [
            api.create(training_file=right),
            api.create(training_file=wrong, method=reinforcement()),
            api.create(training_file=right, validation_file=wrong, method=reinforcement()),
        ]
        errors = [api.until_over(job["id"])["error"] for job in jobs]
        assert [(error["code"], error["param"]) for error in errors] == [
            ("invalid_training_file", "training_file"),
            ("invalid_training_file", "training_file"),
            ("invalid_validation_file", "validation_file"),
        ]
        assert "line 25" in errors[1]["message"]
