import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from parallm.errors import CheckpointError, Unavailable, UnknownModel
from parallm.reports import TrainingStatus
from parallm.types import GivenTrajectory, GivenUpdate, WeightSpan
from tests.server.conftest import make_app


@dataclass
class FakeTraining:
    state: Any = "collecting"
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    error: Exception | None = None
    given: list[GivenTrajectory] = field(default_factory=list)
    serve: bool | None = None
    is_endless: bool = False

    def pause(self, policy: str | None) -> None:
        self._note("pause", policy, "paused")

    def resume(self, policy: str | None) -> None:
        self._note("resume", policy, "collecting")

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        self._note("step", policy, "paused")
        if self.is_endless:
            await asyncio.Event().wait()
        return {} if checkpoint_name is None else {"policy": f"named/{checkpoint_name}"}

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        self._note("train_on", policy, "paused")
        self.given, self.serve = list(given), serve
        if self.is_endless:
            await asyncio.Event().wait()
        return GivenUpdate(
            version=5,
            is_served=True,
            has_moved=True,
            num_trajectories=len(given),
            num_trained=len(given),
            num_recomputed=0,
            num_tokens=4,
            loss=float("nan"),
            gradient_norm=0.5,
            kl_to_behaviour=0.0,
            skipped=None,
            checkpoint=checkpoint_name,
        )

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        self._note("checkpoint", policy, "paused")
        if self.is_endless:
            await asyncio.Event().wait()
        return {"policy": "checkpoints/run/step_000004"}

    async def evaluate(self, policy: str | None) -> Mapping[str, Mapping[str, Any]]:
        self._note("evaluate", policy, "paused")
        return {"policy": {"step": 4, "heldout/accuracy": 0.5, "heldout/loss": float("nan")}}

    async def stop(self, policy: str | None) -> None:
        self._note("stop", policy, "finished")

    def _note(self, what: str, policy: str | None, state: str) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((what, policy))
        self.state = state


@pytest.fixture
def training() -> FakeTraining:
    return FakeTraining()


@pytest.fixture
def client(engine: Any, tokenizer: Any, training: FakeTraining) -> TestClient:
    return TestClient(
        make_app(engine, tokenizer, status=lambda: TrainingStatus(state=training.state, step=4), training=training),
        base_url="http://localhost",
    )


def test_training_is_paused_stepped_and_resumed_and_says_where_it_is(
    client: TestClient, training: FakeTraining
) -> None:
    states = [client.post(f"/v1/training/{what}", json={}).json()["state"] for what in ("pause", "update", "resume")]
    assert states == ["paused", "paused", "collecting"]
    client.post("/v1/training/pause", json={"policy": "poet"})
    assert training.asked == [("pause", None), ("step", None), ("resume", None), ("pause", "poet")]


@pytest.mark.parametrize("path", ["/v1/training/checkpoint", "/training/checkpoint"])
def test_a_checkpoint_says_where_it_is(client: TestClient, path: str) -> None:
    assert client.post(path).json() == {"folders": {"policy": "checkpoints/run/step_000004"}}


def test_an_evaluation_is_answered_by_its_row(client: TestClient, training: FakeTraining) -> None:
    answer = client.post("/v1/training/evaluate", json={"policy": "poet"})
    assert answer.json() == {"evaluations": {"policy": {"step": 4, "heldout/accuracy": 0.5, "heldout/loss": None}}}
    assert training.asked == [("evaluate", "poet")]


def test_training_that_is_stopped_says_so_and_does_not_train(client: TestClient, training: FakeTraining) -> None:
    answer = client.post("/v1/training/stop").json()
    assert (answer["state"], answer["training_enabled"]) == ("finished", False)
    assert training.asked == [("stop", None)]


def test_the_status_has_two_names(client: TestClient) -> None:
    assert client.get("/debug/training").json() == client.get("/v1/training/status").json()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unavailable("training has ended"), 409),
        (UnknownModel("no policy 'poet'"), 404),
        (CheckpointError("the disk is full"), 500),
    ],
)
def test_what_cannot_be_done_is_told(client: TestClient, training: FakeTraining, error: Exception, status: int) -> None:
    training.error = error
    answer = client.post("/v1/training/checkpoint", json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))


def test_a_process_that_only_serves_says_so(call: Callable[..., httpx.Response]) -> None:
    for act in ("pause", "resume", "update", "checkpoint", "evaluate", "stop"):
        answer = call("POST", f"/v1/training/{act}", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "unavailable")
    assert call("POST", "/v1/training/pause", json={"now": 1}).status_code == 400


PAIR = [{"prompt": "2+3=", "completion": "5", "reward": 1}, {"prompt": "2+3=", "completion": "6", "reward": 0.5}]


def test_texts_with_rewards_are_tokens_to_train_on(client: TestClient, training: FakeTraining) -> None:
    body = {"trajectories": PAIR, "update_inference": True, "checkpoint_name": "manual-update-1"}
    answer = client.post("/v1/training/update", json=body).json()
    assert answer["state"] == "paused"
    assert {name: answer["update"][name] for name in ("version", "num_trained", "loss", "checkpoint")} == {
        "version": 5,
        "num_trained": 2,
        "loss": None,
        "checkpoint": "manual-update-1",
    }
    assert training.serve is True
    first, second = training.given
    assert (first.prompt_tokens, first.tokens) == (tuple(map(ord, "2+3=")), (ord("5"), 0))  # ends with the end token
    assert (second.tokens, second.reward, second.group, second.logprobs) == ((ord("6"), 0), 0.5, None, None)
    assert (second.weight_versions, second.loss_mask, second.temperature) == ((), (True, True), 1.0)


def test_an_answer_of_generate_comes_back_as_it_is_with_a_reward(
    client: TestClient, training: FakeTraining, engine: Any
) -> None:
    answer = client.post("/generate", json={"prompt": "hi", "policy_version": 99, "model": "policy"}).json()
    trained = client.post("/v1/training/update", json={"trajectories": [answer | {"reward": 0.5}]})
    assert trained.status_code == 200, trained.text
    (given,) = training.given
    assert (given.prompt_tokens, given.tokens) == (tuple(map(ord, "hi")), (*map(ord, "hi 0"), 0))
    assert given.logprobs == (-0.25,) * 5
    assert given.weight_versions == (WeightSpan(version=3, start=0, end=5),)  # that sampled, not that was believed in


def test_tokens_come_with_log_probs_version_mask_and_group(client: TestClient, training: FakeTraining) -> None:
    given = {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "reward": -1.5,
        "group": 7,
        "logprobs": [-1, -0.5, 0],
        "policy_version": 4,
        "loss_mask": [1, 0, 1],
        "temperature": 0.7,
        "finish_reason": "length",
    }
    assert client.post("/v1/training/update", json={"policy": "poet", "trajectories": [given]}).status_code == 200
    (made,) = training.given
    assert (made.group, made.logprobs, made.loss_mask) == ("7", (-1.0, -0.5, 0.0), (True, False, True))
    assert (made.weight_versions, made.temperature) == ((WeightSpan(version=4, start=0, end=3),), 0.7)
    assert training.asked == [("train_on", "poet")]


def test_an_empty_update_is_one_more_step_which_may_be_saved_under_a_name(
    client: TestClient, training: FakeTraining
) -> None:
    assert "update" not in client.post("/v1/training/update").json()
    answer = client.post("/v1/training/update", json={"checkpoint_name": "one"}).json()
    assert answer["folders"] == {"policy": "named/one"}
    assert training.asked == [("step", None), ("step", None)]


WHOLE = {"prompt_ids": [1], "completion_ids": [2, 3], "reward": 1}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"reward": 1e39}, "trajectories.0.reward"),
        ({"reward": "1"}, "trajectories.0.reward"),
        ({"reward": None}, "trajectories.0.reward"),
        ({"prompt": "a"}, "trajectories.0.prompt"),
        ({"prompt_ids": None}, "trajectories.0.prompt"),
        ({"prompt_ids": []}, "trajectories.0.prompt_ids"),
        ({"completion": "a"}, "trajectories.0.completion"),
        ({"completion_ids": None}, "trajectories.0.completion"),
        ({"completion_ids": [1.5]}, "trajectories.0.completion_ids"),
        ({"completion_ids": None, "completion": "a", "text": "b"}, "trajectories.0.text"),
        ({"completion_ids": None, "completion": "a", "loss_mask": [1]}, "trajectories.0.loss_mask"),
        ({"logprobs": [-1, -1]}, "trajectories.0.policy_version"),
        ({"logprobs": [-1], "policy_version": 1}, "trajectories.0.logprobs"),
        ({"logprobs": [-1, 0.5], "policy_version": 1}, "trajectories.0.logprobs"),
        ({"loss_mask": [0, 0]}, "trajectories.0.loss_mask"),
        ({"loss_mask": [1]}, "trajectories.0.loss_mask"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "trajectories.0.weight_versions"),
        ({"weight_versions": [{"version": "x", "start": 0, "end": 2}]}, "trajectories.0.weight_versions"),
        ({"temperature": 0}, "trajectories.0.temperature"),
        ({"finish_reason": "abort"}, "trajectories.0.finish_reason"),
        ({"completion_ids": [1] * 5000}, "trajectories.0"),
        ({"advantage": 1}, "trajectories.0.advantage"),
    ],
)
def test_trajectories_that_cannot_be_learned_from_are_refused_by_name(
    client: TestClient, training: FakeTraining, fields: dict[str, Any], parameter: str
) -> None:
    answer = client.post("/v1/training/update", json={"trajectories": [WHOLE | fields]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter), answer.text
    assert not training.asked


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": None, "prompt": "a" * 15_000},
        {"prompt_ids": [1] * 1000},
        {"completion_ids": None, "completion": "a" * 15_000},
        {"completion_ids": None, "completion": [1] * 1000},
        {"text": "a" * 15_000},
    ],
)
def test_a_trajectory_that_cannot_fit_is_refused_before_anything_reads_it(
    client: TestClient, training: FakeTraining, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    for name in ("encode", "encode_more", "decode"):
        monkeypatch.setattr(type(tokenizer), name, None)
    answer = client.post("/v1/training/update", json={"trajectories": [WHOLE | fields]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "trajectories.0")
    assert not training.asked


@pytest.mark.parametrize(
    "body",
    [
        {"trajectories": []},
        {"trajectories": [WHOLE] * 4097},
        {"update_inference": False},
        {"checkpoint_name": "../up"},
        {"checkpoint_name": ""},
        {"trajectories": [WHOLE], "checkpoint_name": "a/b"},
    ],
)
def test_wrong_updates_are_refused(client: TestClient, training: FakeTraining, body: dict[str, Any]) -> None:
    assert client.post("/v1/training/update", json=body).status_code == 400
    assert not training.asked


@pytest.mark.parametrize("path", ["/v1/training/update", "/v1/training/checkpoint"])
def test_who_waits_for_a_step_has_a_deadline_and_may_leave(
    client: TestClient, training: FakeTraining, path: str
) -> None:
    training.is_endless = True
    given = [{"prompt": "2+3=", "completion": "5", "reward": 1}]
    bodies: list[dict[str, Any]] = [{}, {"trajectories": given}] if path.endswith("update") else [{}]
    for body in bodies:
        answer = client.post(path, json=body, headers={"x-request-timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
