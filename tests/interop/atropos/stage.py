"""The stage of the tests with Atropos: trainers, a real run-api, and what a scripted environment would post."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from bench.measurement import request_of_tests
from bench.processes import Server, foreign_environment, free_port, python_with, running

from tests.interop.clients.test_clients import OPENAI

SECONDS = 120.0
"""Longest wait for what has to happen."""
QUESTION = "Mia has 3 apples. Mia gets 4 more. How many apples?"
Group = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    python: str
    """An interpreter with atroposlib."""
    folder: Path
    """For all files of a test."""

    def of(self, name: str) -> "Stage":
        folder = self.folder / name
        folder.mkdir(parents=True)
        return replace(self, folder=folder)


def make_stage(folder: Path) -> Stage:
    """atroposlib is in the environment of the other clients."""
    return Stage(python=python_with(request_of_tests().peers / "clients-openai", OPENAI), folder=folder)


def expect(is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(str(shown)[:600])


def wait_until(find: Callable[[], Result | None], what: str, seconds: float = SECONDS) -> Result:
    """Wait until `find` finds something. Raises AssertionError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError, FileNotFoundError):
            if found := find():
                return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


class Trainer:
    """A `parallm.train` that runs."""

    def __init__(self, server: Server, run: Path) -> None:
        self.server = server
        self.url = server.url
        self.run = run
        self.http = httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False)

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
        """The lines of metrics.jsonl, one a step."""
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
def trainer(stage: Stage, overrides: Sequence[str]) -> Iterator[Trainer]:
    """A run from its first answer to its end. Raises RuntimeError if it ends by itself."""
    run = stage.folder / "run"
    with running("parallm.train", [*overrides, f"hydra.run.dir={run}"], stage.folder) as server:
        one = Trainer(server, run)
        try:
            yield one
        finally:
            one.http.close()


class RunApi:
    """The program `run-api` of atroposlib, which can be killed and started again on its port."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(
            base_url=self.url, timeout=SECONDS, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def start(self) -> None:
        """Returns at once."""
        program, folder = str(Path(self._stage.python).with_name("run-api")), self._stage.folder
        with (folder / "run-api.log").open("ab") as output:
            command = [program, "--host", "127.0.0.1", "--port", str(self._port)]
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=foreign_environment(), cwd=folder
            )

    def wait(self) -> None:
        wait_until(lambda: self._http.get("/").status_code == 200, f"run-api at {self.url}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        return self._http.get(path).json()

    def reset(self) -> None:
        self._http.get("/reset_data").raise_for_status()

    def post(self, path: str, body: object) -> httpx.Response:
        """Post as an environment does: numbers that JSON cannot hold go as Python writes them."""
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
        registered = wait_until(
            lambda: answer if (answer := self.post("/register-env", body).json())["status"] == "success" else None,
            "run-api to register an environment",
        )
        return int(registered["env_id"])


@contextmanager
def run_api(stage: Stage) -> Iterator[RunApi]:
    api = RunApi(stage)
    api.start()
    try:
        api.wait()
        yield api
    finally:
        api.kill()
        api.close()


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


def started(stage: Stage, api: str, *names: str) -> list[str]:
    """Overrides of a run that starts run-api at `api` and an environment of the template for each name."""
    environments = ", ".join(f"{name}: {{script: '{{recipes}}/atropos/words.py'}}" for name in names)
    return [
        *base_overrides(api),
        "rollout.atropos.start.api=true",
        f"rollout.atropos.start.python={stage.python}",
        f"rollout.atropos.start.environments={{{environments}}}",
    ]


def greedy(one: Trainer, model: str) -> object:
    """The log-probs of a version's answer."""
    body = {"model": model, "prompt": QUESTION, "max_tokens": 16, "temperature": 0, "logprobs": 1}
    return one.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]


def kv_used(one: Trainer) -> float:
    """The share of memory for keys and values that is used when nothing is kept for later prompts."""
    one.http.post("/reset_prefix_cache").raise_for_status()
    return one.gauge("vllm:kv_cache_usage_perc")
