"""A run of `parallm.train` under run-api, and an environment that posts groups of the policy's completions to it."""

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.processes import Server, metrics
from tests.interop.atropos.stage import Trainer, sampled
from tests.run_api import RunApi, served

MAX_TOKENS, SECONDS_TO_END = 64, 60.0


def main(*, model: str, steps: int, problems: int, group_size: int) -> dict[str, Any]:
    """The rows of the run's metrics, one a step."""
    job = ["rollout=atropos", f"model.path={model}", f"rollout.problems_per_step={problems}", "name=bench"]
    job += [f"rollout.group_size={group_size}", f"rollout.max_tokens={MAX_TOKENS}", "learner.learning_rate=1e-5"]
    job += ["rollout.atropos.max_token_len=512", "rollout.atropos.poll_seconds=0.1", "trainer.evaluate_problems=0"]
    job += [f"trainer.steps={steps}", "trainer.max_off_policy_steps=100"]
    with tempfile.TemporaryDirectory() as name, served(RunApi()) as api:
        run = Path(name) / "run"
        server = Server("parallm.train", [*job, f"rollout.atropos.url={api}", f"hydra.run.dir={run}"], Path(name))
        server.spawn()
        try:
            server.wait()
            post_groups(Trainer(server, run), api, group_size)
            server.wait_to_end(SECONDS_TO_END)
        finally:
            server.stop()
        return {"rows": metrics(run)}


def post_groups(trainer: Trainer, api: str, group_size: int) -> None:
    """Until the run ends, which then refuses more requests; whether it ends well is for its caller to see."""
    with trainer.http, httpx.Client(base_url=api, trust_env=False) as client:
        number = 0
        while trainer.server.process.poll() is None:
            if client.get("/info").json()["batch_size"] <= 0:  # no trainer yet
                time.sleep(0.1)
                continue
            try:
                group = sampled(trainer, group_size, max_tokens=MAX_TOKENS, seed=number)
            except (httpx.HTTPError, KeyError):
                return
            client.post("/scored_data", json=group).raise_for_status()
            number += 1
