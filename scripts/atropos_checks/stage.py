"""What the checks of check_atropos.py play on: trainers, a real run-api, and an environment that obeys."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from server_process import free_port, running_server

SECONDS = 120.0
"""Longest wait for anything that has to happen."""
QUESTION = "Mia has 3 apples. Mia gets 4 more. How many apples?"
Group = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    python: str
    """An interpreter with atroposlib."""
    folder: Path
    """For everything that checks write."""
    model: str | None
    """One that solves some of GSM8K, for the environments of others."""
    data: str | None
    environments: str | None
    """The folder `environments` of Atropos' repository."""
    seeds: Sequence[int] = (0, 1, 2)
    steps: int = 40

    def of(self, name: str) -> "Bench":
        folder = self.folder / name
        folder.mkdir(parents=True)
        return dataclasses.replace(self, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has to say when it has passed."""

    remark: str
    figures: Mapping[str, float] = field(default_factory=dict)


class NotHere(Exception):
    """A check lacks something to run with."""


def expect(is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(str(shown)[:600])


def wait_until(find: Callable[[], Result | None], what: str, seconds: float = SECONDS) -> Result:
    """Until `find` finds something. Raises AssertionError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError, FileNotFoundError):
            if found := find():
                return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


class Trainer:
    """A `parallm.train` that runs."""

    def __init__(self, url: str, process_id: int, run: Path) -> None:
        self.url = url
        self.process_id = process_id
        self.run = run
        self.http = httpx.Client(base_url=url, timeout=SECONDS, trust_env=False)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/v1/training/status").json()
        return answer

    def step(self) -> int:
        return int(self.status()["step"])

    def wait_for_step(self, step: int, seconds: float = SECONDS) -> None:
        def is_there() -> bool:
            status = self.status()
            expect(status["state"] != "failed" or status["step"] >= step, status["message"])
            return bool(status["step"] >= step)

        try:
            wait_until(is_there, f"step {step}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.status()}") from error

    def wait_for_message(self, text: str, seconds: float = SECONDS) -> None:
        try:
            wait_until(lambda: text in self.status()["message"], f"{text!r} in the status", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.status()['message']}") from error

    def pause(self, *, on: bool) -> None:
        self.http.post(f"/v1/training/{'pause' if on else 'resume'}", json={}).raise_for_status()

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, one a step."""
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "reward/mean" in row]

    def log(self) -> str:
        return (self.run / "run.log").read_text()

    def gauge(self, name: str) -> float:
        """The sum of a metric over its labels, from /metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def base_overrides(api: str) -> list[str]:
    """A run that fits eight sequences a step, of the embedded model, and joins the run-api at `api`."""
    return [
        "name=atropos",
        "rollout=atropos",
        f"rollout.atropos.url={api}",
        "rollout.problems_per_step=2",
        "rollout.group_size=4",
        "rollout.max_tokens=48",
        "rollout.atropos.max_token_len=256",
        "rollout.atropos.poll_seconds=0.1",
        "rollout.atropos.start.why_seconds=4",
        "learner.warmup_steps=0",
        "learner.learning_rate=1e-3",
        "trainer.steps=1000",
        "trainer.max_off_policy_steps=100",
        "trainer.evaluate_problems=0",
    ]


@contextmanager
def trainer(bench: Bench, overrides: Sequence[str]) -> Iterator[Trainer]:
    """From its first answer to its end. Raises RuntimeError if it ends by itself."""
    run = bench.folder / "run"
    with running_server("parallm.train", [*overrides, f"hydra.run.dir={run}"], bench.folder) as server:
        yield Trainer(server.url, server.process_id, run)


class RunApi:
    """The program `run-api` of atroposlib, which can be killed and started again on its port."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(
            base_url=self.url, timeout=SECONDS, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def start(self) -> None:
        """Returns at once."""
        program = str(Path(self._bench.python).with_name("run-api"))
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with (self._bench.folder / "run-api.log").open("ab") as output:
            command = [program, "--host", "127.0.0.1", "--port", str(self._port)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=kept, cwd=self._bench.folder)

    def wait(self) -> None:
        wait_until(lambda: self._http.get("/").status_code == 200, f"run-api at {self.url}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def get(self, path: str) -> Any:
        return self._http.get(path).json()

    def reset(self) -> None:
        self._http.get("/reset_data").raise_for_status()

    def post(self, path: str, body: object) -> httpx.Response:
        """As an environment does; numbers that JSON cannot hold go as Python writes them."""
        return self._http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def put(self, *groups: Group) -> None:
        """Post them when a trainer is registered, as environments wait for one: before it they would poison run-api."""
        wait_until(lambda: self.get("/info")["batch_size"] > 0, "a trainer that is registered")
        for group in groups:
            self.post("/scored_data", group).raise_for_status()

    def register_environment(self, *, group_size: int, min_batch_allocation: float | None = None) -> int:
        """Returns its id."""
        body = {
            "max_token_length": 64,
            "desired_name": "scripted",
            "weight": 1.0,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        found = wait_until(
            lambda: answer if (answer := self.post("/register-env", body).json())["status"] == "success" else None,
            "an open door at run-api",
        )
        return int(found["env_id"])


@contextmanager
def run_api(bench: Bench) -> Iterator[RunApi]:
    api = RunApi(bench)
    api.start()
    try:
        api.wait()
        yield api
    finally:
        api.kill()


def sampled(trainer: Trainer, n: int, *, max_tokens: int = 16, seed: int = 0, **fields: Any) -> Group:
    """A group of `n` completions of the policy, as ManagedServer would post them. Their scores are 0, 1, 2 ..."""
    tokens = trainer.http.post("/tokenize", json={"messages": [{"role": "user", "content": QUESTION}]}).json()["tokens"]
    body = {
        "prompt": {"prompt_token_ids": tokens},
        "logprobs": 0,
        "n": n,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
    }
    answer = trainer.http.post("/generate", json=body | fields)
    answer.raise_for_status()
    group: Group = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    for number, places in enumerate(answer.json()["logprobs"]):
        pairs = [next(iter(place[0].items())) for place in places]
        ids = [int(token) for token, _ in pairs]
        group["tokens"].append(tokens + ids)
        group["masks"].append([-100] * len(tokens) + ids)
        group["inference_logprobs"].append([1.0] * len(tokens) + [logprob for _, logprob in pairs])
        group["scores"].append(float(number))
    return group
