"""Training on what clients ask for: whole runs, with clients that talk to them over HTTP."""

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

Train = Callable[..., int]
Act = Callable[[httpx.Client], None]
LIVE = {"source": "live", "problems_per_step": 2, "group_size": 2, "max_tokens": 16}
SECONDS = 60.0


@pytest.fixture
def run(train: Train) -> Callable[..., int]:
    """Trains while `act` is a client in another thread, whose failures are raised here."""

    def whole(act: Act, *, rollout: dict[str, Any] | None = None, **parts: Any) -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        failures: list[BaseException] = []

        def be_client() -> None:
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=SECONDS) as client:
                    wait_for_state(client, "collecting")
                    act(client)
            except BaseException as error:  # noqa: BLE001  raised by the test's own thread
                failures.append(error)
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=be_client)
        thread.start()
        try:
            code = train(rollout={**LIVE, **(rollout or {})}, server={"enabled": True, "port": port}, **parts)
        finally:
            thread.join()
        if failures:
            raise failures[0]
        return code

    return whole


def wait_for_state(client: httpx.Client, state: str) -> None:
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        try:
            if client.get("/v1/training/status").json()["state"] == state:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise TimeoutError(f"the state is not {state}")


def ask(client: httpx.Client, prompt: str, n: int = 2, **fields: Any) -> list[str]:
    """The trajectories of `n` completions."""
    body = {"model": "policy", "prompt": prompt, "n": n, "max_tokens": 8, "collect_trajectory": True}
    choices = client.post("/v1/completions", json=body | fields).raise_for_status().json()["choices"]
    return [choice["trajectory_id"] for choice in choices]


def send(client: httpx.Client, trajectory_id: str, reward: float) -> None:
    client.post(f"/v1/trajectories/{trajectory_id}/reward", json={"reward": reward}).raise_for_status()


def ask_until_the_end(client: httpx.Client) -> None:
    """Pairs of completions, one of each good and one bad."""
    with pytest.raises(httpx.TransportError):  # noqa: PT012  at some point the process is gone
        for number in itertools.count():
            plain = {"model": "policy", "prompt": "1 + 1", "max_tokens": 4}
            client.post("/v1/completions", json=plain)
            response = client.post(
                "/v1/completions",
                json=plain | {"prompt": f"{number} + 1", "n": 2, "collect_trajectory": True},
            )
            for place, choice in enumerate(response.json().get("choices", [])):
                client.post(f"/v1/trajectories/{choice['trajectory_id']}/reward", json={"reward": place})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_made_of_what_clients_have_rewarded(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(ask_until_the_end, trainer={"steps": 3, "max_off_policy_steps": 1}) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["reward/mean"], row["groups/with_signal"], row["update/version"]) == (0.5, 2, row["step"])
        assert row["offpolicy/lag_max"] <= 1
        assert row["parity/mean_abs"] is None or row["parity/mean_abs"] < 1e-5
    assert (tmp_path / "run" / "adapter" / "adapters.safetensors").is_file()


def test_completions_of_different_prompts_have_the_step_for_a_baseline(run: Callable[..., int], tmp_path: Path) -> None:
    def act(client: httpx.Client) -> None:
        for number in range(4):
            (name,) = ask(client, f"{number} + 1", n=1)
            send(client, name, number)

    learner = {"warmup_steps": 0, "learning_rate": 1e-3, "advantage": "reinforce_pp"}
    code = run(act, rollout={"live": {"group_by": "none"}}, learner=learner, trainer={"steps": 1})
    assert code == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["reward/mean"], row["groups/sampled"], row["groups/with_signal"]) == (1.5, 4, 4)
    assert row["update/gradient_norm"] > 0


def test_what_waits_for_clients_can_be_paused_saved_and_stopped(run: Callable[..., int], tmp_path: Path) -> None:
    def act(client: httpx.Client) -> None:
        assert client.post("/v1/training/checkpoint").status_code == 409  # answers, though no step has been
        assert client.post("/v1/training/pause").raise_for_status().json()["state"] == "paused"
        wait_for_state(client, "paused")
        for number in range(2):
            for reward, name in enumerate(ask(client, f"{number} + 1")):
                send(client, name, reward)
        time.sleep(0.5)
        assert client.get("/v1/trajectories").json()["data"]["policy"]["num_rewarded"] == 4
        stepped = client.post("/v1/training/update").raise_for_status().json()
        assert (stepped["step"], stepped["version"]) == (1, 1)
        client.post("/v1/training/resume").raise_for_status()
        wait_for_state(client, "collecting")
        os.kill(os.getpid(), signal.SIGINT)

    assert run(act, trainer={"steps": 9}) == 0
    assert len(rows_of(tmp_path / "run")) == 1


def test_what_waits_for_a_reward_is_there_when_the_run_goes_on(run: Callable[..., int], tmp_path: Path) -> None:
    waiting: list[str] = []

    def before(client: httpx.Client) -> None:
        waiting.extend([*ask(client, "1 + 1"), *ask(client, "2 + 1")])
        os.kill(os.getpid(), signal.SIGINT)

    def after(client: httpx.Client) -> None:
        for place, name in enumerate(waiting):
            send(client, name, place)

    assert run(before, trainer={"steps": 1}) == 0
    assert run(after, trainer={"steps": 1}) == 0
    (row,) = rows_of(tmp_path / "run")
    assert row["reward/mean"] == 1.5


def test_versions_that_are_too_old_are_not_trained_on(run: Callable[..., int], tmp_path: Path) -> None:
    def act(client: httpx.Client) -> None:
        late = ask(client, "9 + 1")
        for number in range(2):
            for reward, name in enumerate(ask(client, f"{number} + 1")):
                send(client, name, reward)
        while client.get("/v1/training/status").json()["version"] < 1:
            time.sleep(0.02)
        wait_for_state(client, "collecting")
        time.sleep(0.3)
        assert client.post(f"/v1/trajectories/{late[0]}/reward", json={"reward": 1}).status_code == 404
        assert client.get("/v1/trajectories").json()["data"]["policy"]["dropped"] == {"stale": 2}
        os.kill(os.getpid(), signal.SIGINT)

    assert run(act, trainer={"steps": 9}) == 0
