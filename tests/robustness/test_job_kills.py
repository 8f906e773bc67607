"""A job and a batch go on after kill -9 at random points: no step and no answer is lost, none counts twice.

Two controls change the folder after each kill as a forgetful server would leave it: answers of the batch are written
again, and the job is called done. The account must find both.
"""

import json
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.measurement import request_of_tests
from bench.processes import Server

STEPS, REQUESTS = 40, 400
SETTINGS = (
    "jobs.enabled=true",
    "jobs.batch_requests=4",
    "jobs.training={rollout: {max_tokens: 8, group_size: 4}, checkpoint: {every: 3}}",
)
MAX_SECONDS = 1.5
"""From the first answer of a process to its end."""
KILLS_PER_CHECKPOINT = 4
"""A job fails on purpose after 8 processes in a row that end without a further checkpoint."""
SECONDS = 600.0
CHAT = "/v1/chat/completions"
GRADER = {
    "type": "string_check",
    "input": "{{sample.output_text}}",
    "operation": "like",
    "reference": "{{item.reference_answer}}",
}
Record = Callable[[str, object], None]
Change = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is there at the end."""

    job: dict[str, Any]
    steps: Sequence[int]
    """Steps in the run's metrics, in their order."""
    events: Sequence[int]
    """Steps that events tell of."""
    answers: Counter[str]
    """Answers by custom id."""
    text: str
    """Answer of the job's model; empty without one."""

    @property
    def lost_steps(self) -> list[int]:
        return sorted(set(range(1, STEPS + 1)) - (set(self.steps) & set(self.events)))

    @property
    def lost_answers(self) -> list[int]:
        return [number for number in range(REQUESTS) if not self.answers[f"{number}"]]

    @property
    def lost(self) -> int:
        return len(self.lost_steps) + len(self.lost_answers) + (not self.text)

    @property
    def twice(self) -> int:
        counts = [*Counter(self.steps).values(), *Counter(self.events).values(), *self.answers.values()]
        return sum(count - 1 for count in counts if count > 1)

    def __str__(self) -> str:
        twice = [name for name, count in self.answers.items() if count > 1]
        return (
            f"the job is {self.job['status']}, error {self.job['error']}; steps lost {self.lost_steps}, of metrics "
            f"{self.steps}, of events {self.events}; answers lost {self.lost_answers}, twice {twice}; its model says "
            f"{self.text!r}"
        )


@pytest.mark.robustness
def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, record_property: Record) -> None:
    kills = request_of_tests().size(20, 2)
    account = hand_in_and_kill(tmp_path, kills, lambda folder: None)
    record_property("jobs.kills", kills)
    record_property("jobs.lost", account.lost)
    record_property("jobs.twice", account.twice)
    assert (account.lost, account.twice) == (0, 0), str(account)
    assert account.job["status"] == "succeeded", str(account)


@pytest.mark.robustness
def test_answers_that_are_written_again_are_found(tmp_path: Path, record_property: Record) -> None:
    account = hand_in_and_kill(tmp_path, 2, write_again)
    record_property("jobs.control_twice", account.twice)
    assert account.twice > 0


@pytest.mark.robustness
def test_a_job_that_is_called_done_is_found(tmp_path: Path, record_property: Record) -> None:
    account = hand_in_and_kill(tmp_path, 2, call_done)
    record_property("jobs.control_lost", account.lost)
    assert account.lost > 0


def write_again(folder: Path) -> None:
    for file in folder.glob("batches/*/output.jsonl"):
        whole = file.read_bytes().rpartition(b"\n")[0]
        file.write_bytes(whole + b"\n" + whole + b"\n" if whole else b"")


def call_done(folder: Path) -> None:
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        connection.execute(
            "UPDATE fine_tuning_jobs SET part = 'succeeded', "
            "record = json_set(record, '$.status', 'succeeded', '$.fine_tuned_model', 'ft:nano:sums:none')"
        )
    for run in folder.glob("runs/*"):
        shutil.rmtree(run)


def hand_in_and_kill(folder: Path, kills: int, change: Change) -> Account:
    """Kill a server `kills` times while it has a job and a batch, and wait for the end of both."""
    source, jobs = random.Random(kills), folder / "checkpoints" / "serve" / "jobs"
    server = Server("parallm.serve", SETTINGS, folder)
    server.spawn()
    server.wait()
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        job, batch = hand_in(http)
        saved = 0
        for number in range(1, kills + 1):
            if number % KILLS_PER_CHECKPOINT == 0:
                saved = wait_for_checkpoint(jobs / "runs" / job, saved)
            time.sleep(source.uniform(0.1, MAX_SECONDS))
            server.kill()
            change(jobs)
            server.spawn()
            server.wait()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            ended_job, ended_batch = (
                http.get(path).json() for path in (f"/v1/fine_tuning/jobs/{job}", f"/v1/batches/{batch}")
            )
            if ended_job["status"] in ("succeeded", "failed") and ended_batch["status"] in ("completed", "failed"):
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"after {SECONDS} s the job is {ended_job['status']}, the batch {ended_batch['status']}")
        account = account_of(http, ended_job, ended_batch, jobs / "runs" / job / "metrics.jsonl")
    server.stop()
    return account


def wait_for_checkpoint(run: Path, saved: int) -> int:
    """Wait for a checkpoint after step `saved`, unless the run has ended; return the step of the newest one."""
    until = time.monotonic() + SECONDS
    while (newest := newest_step(run)) <= saved < STEPS and run.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return newest


def newest_step(run: Path) -> int:
    return max((int(folder.name.removeprefix("step_")) for folder in run.glob("step_??????")), default=0)


def hand_in(http: httpx.Client) -> tuple[str, str]:
    """Return the ids of a job and a batch."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 6)]
    problems = [{"messages": [{"role": "user", "content": f"{a} + {b}?"}], "reference_answer": a + b} for a, b in sums]
    requests = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": "base",
                "messages": [{"role": "user", "content": f"{number} + 1?"}],
                "max_tokens": 16,
                "temperature": 0,
            },
        }
        for number in range(REQUESTS)
    ]
    training, asked = upload(http, problems, "fine-tune"), upload(http, requests, "batch")
    hyperparameters = {"n_epochs": STEPS * 8 // len(problems), "batch_size": 8}
    job = {
        "model": "base",
        "training_file": training,
        "seed": 1,
        "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},
    }
    batch = {"input_file_id": asked, "endpoint": CHAT, "completion_window": "24h"}
    made = [http.post(path, json=body) for path, body in (("/v1/fine_tuning/jobs", job), ("/v1/batches", batch))]
    return made[0].raise_for_status().json()["id"], made[1].raise_for_status().json()["id"]


def upload(http: httpx.Client, rows: Sequence[Any], purpose: str) -> str:
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    response = http.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": purpose})
    name: str = response.raise_for_status().json()["id"]
    return name


def account_of(http: httpx.Client, job: dict[str, Any], batch: dict[str, Any], metrics: Path) -> Account:
    events = http.get(f"/v1/fine_tuning/jobs/{job['id']}/events?limit=100").json()["data"]
    steps = [event["data"]["step"] for event in events[::-1] if event["message"].startswith("Step ")]
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    texts = [
        http.get(f"/v1/files/{file}/content").text for file in (batch["output_file_id"], batch["error_file_id"]) if file
    ]
    question = {
        "model": job["fine_tuned_model"] or "none",
        "messages": [{"role": "user", "content": "2 + 3?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    answer = http.post(CHAT, json=question)
    return Account(
        job=job,
        steps=[json.loads(row)["step"] for row in rows],
        events=steps,
        answers=Counter(json.loads(line)["custom_id"] for text in texts for line in text.splitlines()),
        text=answer.json()["choices"][0]["message"]["content"] if answer.status_code == httpx.codes.OK else "",
    )
