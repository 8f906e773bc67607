"""Training on what clients ask for: whole runs, with clients that talk to them over HTTP."""

import itertools
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from parallm.learner.adapter_learner import AdapterLearner, OptimizerStep
from parallm.learner.learner import Learner

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


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


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


@pytest.mark.parametrize("learner", [{}, {"advantage": "reinforce_pp"}], ids=["group", "step"])
def test_equal_rewards_are_trained_on_where_the_objective_says_so(
    run: Callable[..., int], tmp_path: Path, learner: dict[str, Any]
) -> None:
    def act(client: httpx.Client) -> None:
        for number, rewards in enumerate(((1.0, 1.0), (1.0, 0.0), (1.0, 0.0))):
            for name, reward in zip(ask(client, f"{number} + 1", ignore_eos=True), rewards, strict=True):
                send(client, name, reward)

    assert run(act, learner=learner, trainer={"steps": 1}) == 0
    (row,) = rows_of(tmp_path / "run")
    assert (row["groups/sampled"], row["groups/with_signal"]) == (3, 2)
    assert row["update/tokens"] == (6 if learner else 4) * 8


def test_what_waits_for_clients_can_be_paused_saved_and_stopped(run: Callable[..., int], tmp_path: Path) -> None:
    def act(client: httpx.Client) -> None:
        assert client.post("/v1/training/checkpoint").status_code == 409  # answers, though no step has been
        refused = client.post("/v1/training/update")
        assert (refused.status_code, "no step can begin" in refused.text) == (409, True)
        assert client.post("/v1/training/pause").raise_for_status().json()["state"] == "paused"
        wait_for_state(client, "paused")
        for number in range(2):
            for reward, name in enumerate(ask(client, f"{number} + 1")):
                send(client, name, reward)
        time.sleep(0.5)
        assert client.get("/v1/trajectories").json()["data"]["policy"]["num_rewarded"] == 4
        stepped = client.post("/v1/training/update").raise_for_status().json()
        assert (stepped["step"], stepped["version"]) == (1, 1)
        assert client.post("/v1/training/resume").raise_for_status().json()["state"] == "collecting"
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


def rate_two_groups(client: httpx.Client) -> list[str]:
    """Trajectories of one step, of which every second one is good."""
    names = [name for number in range(2) for name in ask(client, f"{number} + 1")]
    for place, name in enumerate(names):
        send(client, name, place % 2)
    return names


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.02)


def step_of(client: httpx.Client) -> int:
    return int(client.get("/v1/training/status").json()["step"])


def counts(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/v1/trajectories").json()["data"]["policy"])


@pytest.mark.parametrize("every", [1, 10])
def test_what_a_step_took_is_trained_on_once_whenever_the_process_is_killed(
    run: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    names: list[str] = []
    checkpoint = {"resume": "auto", "every": every}

    def before(client: httpx.Client) -> None:
        names.extend(rate_two_groups(client))
        until(lambda: counts(client)["num_trained"] == 4 if every == 1 else step_of(client) == 1)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")  # what a process that is killed now would leave
        os.kill(os.getpid(), signal.SIGINT)

    def after(client: httpx.Client) -> None:
        until(lambda: step_of(client) == 1)
        for place, name in enumerate(names):  # their answers were lost on the way
            send(client, name, place % 2)
        told = counts(client)
        assert told["num_trained"] + told["num_reserved"] == told["num_collected"] == 4
        assert (told["num_trained"], told["dropped"]) == (4 if every == 1 else 0, {})
        os.kill(os.getpid(), signal.SIGINT)

    assert run(before, trainer={"steps": 9}, checkpoint=checkpoint) == 0
    with caplog.at_level("INFO"):
        assert run(after, trainer={"steps": 9}, checkpoint=checkpoint, folder="killed") == 0
    assert ("resumed after step 1, version 1" in caplog.messages) == (every == 1)
    waits = "4 trajectories wait, 4 with a reward, 4 of steps after the checkpoint"
    assert (waits in caplog.messages) == (every == 10)
    (row,) = rows_of(tmp_path / "killed")
    assert (row["step"], row["reward/mean"], row["groups/with_signal"]) == (1, 0.5, 2)


def test_a_version_that_an_operator_has_named_is_there_after_a_kill_though_no_checkpoint_holds_it(
    run: Callable[..., int], tmp_path: Path
) -> None:
    checkpoint = {"resume": "auto", "every": 10}
    digests: dict[str, str] = {}

    def adapter_state(client: httpx.Client) -> dict[str, str]:
        return {one["id"]: one["digest"] for one in client.get("/v1/adapters").json()["data"]}

    def before(client: httpx.Client) -> None:
        rate_two_groups(client)
        until(lambda: step_of(client) == 1)
        client.post("/v1/training/checkpoint").raise_for_status()
        rate_two_groups(client)
        until(lambda: step_of(client) == 2)
        digests.update(adapter_state(client))
        client.post("/v1/adapters/aliases", json={"alias": "stable", "version": 2}).raise_for_status()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        os.kill(os.getpid(), signal.SIGINT)

    def after(client: httpx.Client) -> None:
        until(lambda: step_of(client) == 2)
        found = adapter_state(client)
        assert (found["policy@2"], found["policy@3"]) == (digests["policy@2"], digests["policy@1"])
        answer = client.post("/v1/completions", json={"model": "stable", "prompt": "1", "max_tokens": 1}).json()
        assert answer["model"] == "policy@2"
        os.kill(os.getpid(), signal.SIGINT)

    trainer = {"steps": 9, "max_off_policy_steps": 1}
    assert run(before, trainer=trainer, checkpoint=checkpoint) == 0
    assert run(after, trainer=trainer, checkpoint=checkpoint, folder="killed") == 0
    row = rows_of(tmp_path / "killed")[-1]
    assert (row["step"], row["update/version"], row["offpolicy/lag_max"]) == (2, 4, 0)
    assert row["parity/mean_abs"] < 1e-5  # what version 1 said is on policy: version 3 has its weights


def test_what_a_step_without_an_update_took_is_trained_on_by_the_next(
    run: Callable[..., int], tmp_path: Path, break_gradient: Callable[[int], None]
) -> None:
    break_gradient(1)
    assert run(lambda client: rate_two_groups(client) and None, trainer={"steps": 2}, checkpoint={"every": 1}) == 0
    rows = rows_of(tmp_path / "run")
    assert [(row["guard/skipped"], row["reward/mean"], row["update/version"]) for row in rows] == [
        (1, 0.5, 0),
        (1, 0.5, 1),
    ]


def test_what_ends_the_run_each_time_it_is_trained_on_does_not_end_it_for_ever(
    run: Callable[..., int], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug of the learner")

    monkeypatch.setattr(Learner, "update", fail)
    with pytest.raises(ZeroDivisionError):
        run(rate_two_groups, checkpoint={"resume": "auto"})
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(rollout=LIVE, server={"enabled": True, "port": 0}, checkpoint={"resume": "auto"})

    def after(client: httpx.Client) -> None:
        assert counts(client)["dropped"] == {"fault": 4}
        os.kill(os.getpid(), signal.SIGINT)

    assert run(after, checkpoint={"resume": "auto"}) == 0


def test_a_step_that_is_undone_drops_what_it_learned_from_and_no_more(
    run: Callable[..., int], tmp_path: Path, break_gradient: Callable[[int], None]
) -> None:
    def act(client: httpx.Client) -> None:
        rate_two_groups(client)
        until(lambda: step_of(client) == 1)
        rate_two_groups(client)
        until(lambda: step_of(client) == 3)
        told = counts(client)
        assert (told["num_trained"] + told["num_reserved"], told["dropped"]) == (4, {"undone": 4})
        os.kill(os.getpid(), signal.SIGINT)

    break_gradient(2)
    trainer = {"steps": 9, "max_off_policy_steps": 4, "guard": {"max_skips": 1}}
    assert run(act, trainer=trainer, checkpoint={"every": 1}) == 0
    assert [row["update/version"] for row in rows_of(tmp_path / "run")] == [1, 1, 3]


def test_a_step_that_has_moved_nothing_has_made_no_version_that_could_be_undone(
    run: Callable[..., int],
    tmp_path: Path,
    break_gradient: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    compute_step, numbers = AdapterLearner.compute_step, itertools.count(1)

    def second_moves_nothing(self: AdapterLearner, gradient_N: mx.array, step: int) -> OptimizerStep:
        found = compute_step(self, gradient_N, step)
        return found if next(numbers) != 2 else replace(found, has_moved=mx.array(False))

    def act(client: httpx.Client) -> None:
        for step in (1, 2):
            names.extend(rate_two_groups(client))
            until(lambda step=step: step_of(client) == step)  # type: ignore[misc]
        rate_two_groups(client)
        until(lambda: step_of(client) == 4)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(AdapterLearner, "compute_step", second_moves_nothing)
    break_gradient(3)
    trainer = {"steps": 9, "max_off_policy_steps": 4, "guard": {"max_skips": 1}}
    assert run(act, trainer=trainer, checkpoint={"every": 10}) == 0
    assert [row["update/version"] for row in rows_of(tmp_path / "run")] == [1, 1, 1, 3]
    gone = [line for line in rows_of(tmp_path / "run", "trajectories.jsonl") if line.get("reason") == "undone"]
    assert [name for line in gone for name in line["gone"]] == names[:4]


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
