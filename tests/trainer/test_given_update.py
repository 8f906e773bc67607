"""Updates on trajectories that clients bring, in whole runs over HTTP."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from parallm.client import Client
from parallm.errors import ProblemError
from parallm.rollout.runner import RolloutRunner

Run = Callable[..., int]
UPDATE = "/v1/training/update"


def pair(prompt: str = "2 + 3 =", **fields: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "completion": text, "reward": reward, **fields} for text, reward in ((" 5", 1), (" 6", 0))
    ]


def version_of(client: httpx.Client, model: str) -> int:
    return int(client.get(f"/v1/models/{model}").json()["policy_version"])


def test_an_update_on_given_texts_makes_and_serves_a_version_between_two_steps(
    run_with_client: Run, tmp_path: Path
) -> None:
    def act(client: httpx.Client) -> None:
        before = client.get("/v1/training/status").json()
        answer = client.post(UPDATE, json={"trajectories": pair() + pair("4 + 4 =")}).raise_for_status().json()
        made = answer["update"]
        assert (made["version"], made["is_served"], made["skipped"]) == (before["version"] + 1, True, None)
        assert (made["num_trajectories"], made["num_trained"], made["num_recomputed"]) == (4, 4, 4)
        assert made["gradient_norm"] > 0
        assert (answer["step"], answer["version"]) == (before["step"], made["version"])
        assert answer["loss"] == made["loss"]
        assert answer["last_update"] > (before["last_update"] or "")
        assert version_of(client, "policy") == made["version"]
        assert client.post(UPDATE).json()["step"] == before["step"] + 1  # a step of training goes on from it
        assert version_of(client, "policy") == made["version"] + 1

    assert run_with_client(act) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["update/version"] == len(rows) + 1


def test_what_was_recomputed_equals_what_was_sampled(run_with_client: Run) -> None:
    def act(client: httpx.Client) -> None:
        asked = {"prompt": "2 + 3 =", "policy_version": 0, "model": "latest", "n": 2, "max_tokens": 6}
        asked["temperature"] = 0.5
        answers = client.post("/generate", json=asked | {"ignore_eos": True}).raise_for_status().json()
        told = [one | {"reward": place, "temperature": 0.5} for place, one in enumerate(answers)]
        known = client.post(UPDATE, json={"trajectories": told, "update_inference": False}).json()
        assert known["update"]["num_recomputed"] == 0, known
        names = ("prompt_ids", "completion_ids", "reward", "temperature")
        bare = [{name: one[name] for name in names} for one in told]
        recomputed = client.post(UPDATE, json={"trajectories": bare, "update_inference": False}).json()["update"]
        assert (recomputed["num_recomputed"], recomputed["num_tokens"]) == (2, 12)
        assert (known["update"]["kl_to_behaviour"], recomputed["kl_to_behaviour"]) == (0, 0)
        late = client.post(UPDATE, json={"trajectories": told})
        assert late.status_code == 400
        assert "trainer.max_off_policy_steps=0" in late.json()["error"]["message"]
        assert abs(known["update"]["gradient_norm"]) > 0

    assert run_with_client(act) == 0


def test_the_client_samples_pays_and_trains(run_with_client: Run) -> None:
    def act(http: httpx.Client) -> None:
        client = Client("", http=http)
        version = client.training_status().version
        for _ in range(20):  # until two completions differ
            answers = client.generate_all(["2 + 3 ="], n=4, policy_version=version, max_tokens=4, temperature=1.5)
            rewards = [float(sum(one.completion_ids) % 2) for one in answers]
            if len(set(rewards)) > 1:
                break
        rewarded = [one.rewarded(reward) for one, reward in zip(answers, rewards, strict=True)]
        made = client.train_on(rewarded, update_inference=True)
        assert (made.num_recomputed, made.num_trained, made.version) == (0, 4, version + 1)
        assert client.generate("2 + 3 =", max_tokens=4).current_policy_version == version + 1
        assert client.training_status().current_lora == f"checkpoint-{version + 1}"

    assert run_with_client(act) == 0


def test_an_update_that_is_not_for_clients_is_the_newest_and_not_what_they_get(
    run_with_client: Run,
) -> None:
    def act(client: httpx.Client) -> None:
        served = version_of(client, "policy")
        made = client.post(UPDATE, json={"trajectories": pair(), "update_inference": False}).json()["update"]
        assert (made["version"], made["is_served"]) == (served + 1, False)
        assert (version_of(client, "policy"), version_of(client, "latest")) == (served, served + 1)

    assert run_with_client(act) == 0


def test_an_update_is_served_where_steps_wait_for_an_evaluation_only_if_that_is_asked_for(
    run_with_client: Run,
) -> None:
    def act(client: httpx.Client) -> None:
        assert client.post(UPDATE, json={"trajectories": pair()}).json()["update"]["is_served"] is False
        made = client.post(UPDATE, json={"trajectories": pair(), "update_inference": True}).json()["update"]
        assert made["is_served"] is True

    trainer = {"steps": 1000, "publish_if": "evaluation", "evaluate_problems": 4, "evaluate_every": 1000}
    assert run_with_client(act, trainer=trainer) == 0


def test_a_named_checkpoint_stays_and_training_goes_on_from_it(
    run_with_client: Run, train: Callable[..., int], tmp_path: Path
) -> None:
    def act(client: httpx.Client) -> None:
        body = {"trajectories": pair(), "checkpoint_name": "manual-update-1"}
        made = client.post(UPDATE, json=body).raise_for_status().json()["update"]
        assert made["checkpoint"].endswith("run/named/manual-update-1")
        again = client.post(UPDATE, json=body)
        assert again.status_code == 400
        assert "there is a checkpoint called manual-update-1 already" in again.json()["error"]["message"]
        assert client.get("/v1/training/status").json()["version"] == made["version"]
        for _ in range(3):
            client.post(UPDATE).raise_for_status()

    assert run_with_client(act, checkpoint={"every": 1, "keep": 1}) == 0
    named = tmp_path / "run" / "named" / "manual-update-1"
    values = json.loads((named / "state.json").read_text())
    step = values["step"] + 1
    assert train(folder="next", trainer={"steps": step}, checkpoint={"resume": str(named)}) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "next" / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["update/version"]) == (step, values["version"] + 1)


def test_an_update_before_the_first_step_is_saved_at_the_end(run_with_client: Run, tmp_path: Path) -> None:
    def act(client: httpx.Client) -> None:
        assert client.get("/v1/training/status").json()["step"] == 0
        client.post(UPDATE, json={"trajectories": pair()}).raise_for_status()

    live = {"source": "live", "problems_per_step": 2, "group_size": 2, "max_tokens": 16}
    assert run_with_client(act, rollout=live) == 0
    state = json.loads((tmp_path / "run" / "step_000000" / "state.json").read_text())
    assert state["version"] == 1


def test_an_update_is_saved_when_the_next_step_ends_the_run(
    run_with_client: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[int] = []

    async def fail(*_: Any) -> None:
        raise ProblemError("cannot be played")

    def act(client: httpx.Client) -> None:
        answer = client.post(UPDATE, json={"trajectories": pair()}).raise_for_status().json()
        made.append(answer["update"]["version"])
        monkeypatch.setattr(RolloutRunner, "run_episodes", fail)
        with suppress(httpx.TransportError):  # the process ends
            client.post("/v1/training/resume")
            while client.get("/v1/training/status").json()["state"] != "failed":
                time.sleep(0.01)

    with pytest.raises(ProblemError):
        run_with_client(act, checkpoint={"every": 1000})
    states = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("step_*/state.json")]
    assert max(state["version"] for state in states) >= made[0]


def test_what_cannot_be_learned_from_changes_nothing(run_with_client: Run) -> None:
    def act(client: httpx.Client) -> None:
        before = version_of(client, "latest")
        for trajectories, message in (
            (pair()[:1], "there is nothing to learn"),
            ([one | {"reward": 1} for one in pair()], "there is nothing to learn"),
            ([{"prompt_ids": [99999], "completion_ids": [1], "reward": 1}], "token ids of trajectories.0"),
            ([{"prompt_ids": [5] * 2000, "completion_ids": [1], "reward": 1}], "maximum context length"),
        ):
            answer = client.post(UPDATE, json={"trajectories": trajectories})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        assert version_of(client, "latest") == before

    assert run_with_client(act) == 0


def test_updates_that_are_not_finite_are_skipped_and_never_undo_what_is_good(
    run_with_client: Run,
) -> None:
    def act(client: httpx.Client) -> None:
        client.post(UPDATE).raise_for_status()
        before = version_of(client, "latest")
        wild = [
            {
                "prompt_ids": [5, 6, 7, 8],
                "completion_ids": [7, 1],
                "reward": place,
                "logprobs": [-1e30, -1],
                "policy_version": before,
            }
            for place in range(2)
        ]
        for _ in range(4):  # as many steps in a row would roll back
            made = client.post(UPDATE, json={"trajectories": wild}).raise_for_status().json()["update"]
            assert "not finite" in made["skipped"]
            assert made["version"] == before
        assert client.post(UPDATE, json={"trajectories": pair()}).json()["update"]["version"] == before + 1

    assert run_with_client(act) == 0


def test_a_reward_that_the_advantage_cannot_take_is_refused_and_ends_no_run(
    run_with_client: Run,
) -> None:
    def act(client: httpx.Client) -> None:
        below = [one | {"reward": -place} for place, one in enumerate(pair())]
        answer = client.post(UPDATE, json={"trajectories": below})
        assert (answer.status_code, "max_rl" in answer.json()["error"]["message"]) == (400, True)
        assert client.post(UPDATE, json={"trajectories": pair()}).json()["update"]["skipped"] is None

    assert run_with_client(act, learner={"warmup_steps": 0, "learning_rate": 1e-3, "advantage": "max_rl"}) == 0


def test_a_run_that_learns_from_demonstrations_takes_no_rewards(run_with_client: Run, tmp_path: Path) -> None:
    lines = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(8)]
    (tmp_path / "demos.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def act(client: httpx.Client) -> None:
        answer = client.post(UPDATE, json={"trajectories": pair()})
        assert (answer.status_code, "learner.data" in answer.json()["error"]["message"]) == (409, True)

    assert run_with_client(act, learner={"preset": "sft", "data": str(tmp_path / "demos.jsonl")}) == 0
