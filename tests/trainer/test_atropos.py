"""Training on what environments post: whole runs between an API on loopback and an environment in another thread."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from parallm.errors import ConfigError
from tests.run_api import RunApi, served

Train = Callable[..., int]
SECONDS = 60.0
ROLLOUT = {"source": "atropos", "problems_per_step": 2, "group_size": 2}


class Environment:
    """Asks for pairs of completions in the words of Atropos' VLLMServer, and posts them with a dense reward."""

    def __init__(self, api: str, model: str) -> None:
        self.api = httpx.Client(base_url=api, trust_env=False, timeout=SECONDS)
        self.model = httpx.Client(base_url=model, trust_env=False, timeout=SECONDS)
        self.number = 0

    def close(self) -> None:
        self.api.close()
        self.model.close()

    def wait(self) -> None:
        """Until a trainer has asked for its first batch, and its model answers: an API that an earlier trainer has left
        takes environments at once."""
        until(lambda: self.api.post("/register-env").json()["status"] == "success")
        until(self.has_model)

    def has_model(self) -> bool:
        try:
            return self.model.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def group(self, env_id: int = 0, **sampling: Any) -> dict[str, Any]:
        self.number += 1
        prompt = [20 + self.number % 50, 21, 22]
        body = {"prompt": {"prompt_token_ids": prompt}, "n": 2, "max_tokens": 6, "logprobs": 0, "temperature": 1.5}
        answer = self.model.post("/generate", json=body | sampling).raise_for_status().json()
        pairs = [[next(iter(place[0].items())) for place in one] for one in answer["logprobs"]]
        completions = [[int(token) for token, _ in one] for one in pairs]
        return {
            "tokens": [prompt + one for one in completions],
            "masks": [[-100] * len(prompt) + one for one in completions],
            "scores": [0.0, 1.0],
            "inference_logprobs": [[1.0] * len(prompt) + [logprob for _, logprob in one] for one in pairs],
            "env_id": env_id,
        }

    def post(self, group: dict[str, Any]) -> None:
        self.api.post("/scored_data", json=group).raise_for_status()

    def queue(self) -> int:
        """Groups that no batch was formed of yet."""
        return int(self.api.get("/status").json()["queue_size"])

    def step(self) -> int:
        """Finished steps of the trainer."""
        return int(self.model.get("/v1/training/status").json()["step"])


Act = Callable[[Environment], None]


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        if is_so():
            return
        time.sleep(0.02)
    raise TimeoutError(is_so)


@pytest.fixture
def run_api() -> RunApi:
    return RunApi()


@pytest.fixture
def url(run_api: RunApi) -> Iterator[str]:
    with served(run_api) as address:
        yield address


@pytest.fixture
def run(train: Train, url: str) -> Callable[..., int]:
    """Trains while `act` is an environment in another thread, whose failures are raised here."""

    def whole(act: Act, *, atropos: dict[str, Any] | None = None, **parts: Any) -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        failures: list[BaseException] = []

        def be_environment() -> None:
            environment = Environment(url, f"http://127.0.0.1:{port}")
            try:
                environment.wait()
                act(environment)
            except BaseException as error:  # noqa: BLE001  raised by the test's own thread
                failures.append(error)
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                environment.close()

        thread = threading.Thread(target=be_environment)
        thread.start()
        values = {"url": url, "max_token_len": 64, "poll_seconds": 0.02, **(atropos or {})}
        try:
            code = train(
                rollout={**ROLLOUT, "atropos": values},
                server={"enabled": True, "port": port},
                **{"trainer": {"steps": 3, "max_off_policy_steps": 4}, **parts},
            )
        finally:
            thread.join()
        if failures:
            raise failures[0]
        return code

    return whole


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def post_until_the_end(environment: Environment) -> None:
    """Two groups a step, as an environment with max_batches_offpolicy 1 does."""
    environment.post(environment.group())  # a trainer without any would wait for ever
    environment.post(environment.group())
    with pytest.raises(httpx.HTTPError):  # noqa: PT012  at some point the trainer refuses, or is gone
        until(lambda: environment.step() >= 0 and environment.queue() == 0)
        while True:
            for _ in range(2):
                environment.post(environment.group())
            until(lambda: environment.step() >= 0 and environment.queue() == 0)


def test_steps_are_made_of_what_environments_post(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(post_until_the_end) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["reward/mean"], row["groups/with_signal"], row["update/version"]) == (0.5, 2, row["step"])
        assert (row["atropos/joined_fraction"], row["atropos/refused"]) == (1.0, 0)
        assert row["parity/mean_abs"] is None or row["parity/mean_abs"] < 1e-5
    assert rows[0]["parity/tokens"] > 0
    assert (tmp_path / "run" / "adapter" / "adapters.safetensors").is_file()
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["problem_id"].startswith("env_0/")


def test_what_was_not_sampled_here_is_not_trained_on(run: Callable[..., int], tmp_path: Path) -> None:
    def act(environment: Environment) -> None:
        for strange in (True, False):
            for _ in range(2):
                group = environment.group()
                if strange:
                    group["tokens"][1][-1] = group["masks"][1][-1] = 3 + (group["tokens"][1][-1] == 3)
                environment.post(group)

    assert run(act, trainer={"steps": 1, "max_off_policy_steps": 4}) == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["atropos/refused/unmatched"], row["atropos/groups"], row["groups/sampled"]) == (2, 4, 2)
    kept = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in kept] == ["unmatched", "unmatched"]
    assert len(kept[0]["group"]["tokens"]) == 2


def test_what_was_not_sampled_here_counts_as_the_policys_own_if_that_is_wished(
    run: Callable[..., int], tmp_path: Path
) -> None:
    def act(environment: Environment) -> None:
        tokens = [[20, 21, 22, 30 + place, 31] for place in range(2)]
        group = {"tokens": tokens, "masks": [[-100] * 3 + one[3:] for one in tokens], "scores": [1.0, 0.0]}
        for _ in range(2):
            environment.post(group)

    code = run(act, atropos={"unmatched": "recompute"}, trainer={"steps": 1, "max_off_policy_steps": 0})
    assert code == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["atropos/recomputed"], row["parity/tokens"], row["offpolicy/lag_max"]) == (4, 8, 0)
    assert row["parity/max_abs"] < 1e-5  # sampled log-probs are those of the learner
    assert row["update/gradient_norm"] > 0


def test_groups_that_are_too_old_are_dropped_and_counted(run: Callable[..., int], tmp_path: Path) -> None:
    def act(environment: Environment) -> None:
        late = [environment.group() for _ in range(2)]
        for number in range(2):
            for _ in range(2):
                environment.post(environment.group())
            until(lambda wanted=number + 1: environment.step() == wanted)  # type: ignore[misc]
        for group in late:
            environment.post(group)
        post_until_the_end(environment)

    assert run(act, trainer={"steps": 3, "max_off_policy_steps": 1}) == 0
    rows = rows_of(tmp_path / "run")
    assert (rows[-1]["atropos/refused/stale"], rows[-1]["offpolicy/dropped"]) == (2, 2)
    assert all(row["offpolicy/lag_max"] <= 1 for row in rows)


def test_greedy_samples_and_nonsense_are_refused_and_training_goes_on(run: Callable[..., int], tmp_path: Path) -> None:
    def act(environment: Environment) -> None:
        environment.post(environment.group(temperature=0.0))
        ragged = environment.group()
        ragged["masks"][0] = ragged["masks"][0][:-1]
        environment.post(ragged)
        environment.model.post("/generate", json={"prompt": {"prompt_token_ids": [5]}, "max_tokens": 1})  # a probe
        post_until_the_end(environment)

    assert run(act, trainer={"steps": 1, "max_off_policy_steps": 4}) == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["atropos/refused/greedy"], row["atropos/refused/ragged"], row["atropos/refused"]) == (1, 1, 2)


def test_an_api_that_is_restarted_costs_no_step_and_no_batch_twice(
    run: Callable[..., int], run_api: RunApi, tmp_path: Path
) -> None:
    def act(environment: Environment) -> None:
        for _ in range(2):
            environment.post(environment.group())
        until(lambda: environment.step() == 1)
        run_api.restart()
        run_api.post(environment.group())  # too early: no trainer can register behind this
        environment.wait()
        assert environment.step() == 1
        post_until_the_end(environment)

    assert run(act, trainer={"steps": 2, "max_off_policy_steps": 4}) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[-1]["atropos/lost"], rows[-1]["atropos/batches"]) == (1, 2)
    assert run_api.state["batch_size"] == 4


def test_a_run_goes_on_with_the_api_that_it_left(run: Callable[..., int], run_api: RunApi, tmp_path: Path) -> None:
    assert run(post_until_the_end, trainer={"steps": 2, "max_off_policy_steps": 4}) == 0
    run_api.post({"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]})
    code = run(
        post_until_the_end, trainer={"steps": 3, "max_off_policy_steps": 4}, checkpoint={"resume": "auto", "every": 1}
    )
    assert code == 0
    rows = rows_of(tmp_path / "run")
    assert [(row["step"], row["update/version"]) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert rows[-1]["atropos/refused/unmatched"] >= 1  # what was left there is nothing that this process has sampled


def test_of_two_policies_each_learns_from_its_own_environments(
    run: Callable[..., int], url: str, run_api: RunApi, tmp_path: Path
) -> None:
    other = RunApi()

    def act(environment: Environment) -> None:
        until(lambda: bool(other.state.get("started")))
        # all of them first: a run whose policies have had their steps ends
        poets = [environment.group(model="poet") for _ in range(4)]
        coders = [environment.group(model="coder") for _ in range(4)]
        for own, foreign, coder in zip(poets[:2], poets[2:], coders[:2], strict=True):
            environment.post(own)
            other.post(foreign)  # of another policy than that which learns from here
            other.post(coder)
        for coder in coders[2:]:
            other.post(coder)

    with served(other) as other_url:
        rollout = {"atropos": {"url": other_url}}
        policies = {"poet": {"trainer": {"steps": 1}}, "coder": {"rollout": rollout, "trainer": {"steps": 1}}}
        assert run(act, policies=policies) == 0
    poet, coder = (rows_of(tmp_path / "run" / name)[-1] for name in policies)
    assert (poet["atropos/joined_fraction"], poet["atropos/refused"]) == (1.0, 0)
    assert coder["atropos/refused/unmatched"] >= 1
    assert coder["update/version"] == 1


def test_an_api_with_the_sizes_of_another_run_ends_the_run(train: Train, url: str, run_api: RunApi) -> None:
    httpx.post(f"{url}/register", json={"starting_step": 0, "batch_size": 32, "max_token_len": 64}, trust_env=False)
    values = {"url": url, "max_token_len": 64}
    with pytest.raises(ConfigError, match="batch_size=32 and max_token_len=64, this run has batch_size=4"):
        train(rollout={**ROLLOUT, "atropos": values}, server={"enabled": True, "port": 0})
    assert "/reset_data" not in run_api.calls


def test_sequences_longer_than_the_context_are_refused_before_training(train: Train, url: str) -> None:
    with pytest.raises(ConfigError, match="max_token_len=100000 is more than the context"):
        train(
            rollout={**ROLLOUT, "atropos": {"url": url, "max_token_len": 100_000}}, server={"enabled": True, "port": 0}
        )
