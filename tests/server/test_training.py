import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from parallm.errors import CheckpointError, Unavailable, UnknownModel
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.settings import ServerSettings


@dataclass
class FakeTraining:
    state: Any = "collecting"
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    error: Exception | None = None
    is_endless: bool = False

    def pause(self, policy: str | None) -> None:
        self._note("pause", policy, "paused")

    def resume(self, policy: str | None) -> None:
        self._note("resume", policy, "collecting")

    async def step(self, policy: str | None) -> None:
        self._note("step", policy, "paused")
        if self.is_endless:
            await asyncio.Event().wait()

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        self._note("checkpoint", policy, "paused")
        if self.is_endless:
            await asyncio.Event().wait()
        return {"policy": "checkpoints/run/step_000004"}

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
        create_app(
            engine=engine,
            tokenizer=tokenizer,
            catalog=tuple,
            status=lambda: TrainingStatus(state=training.state, step=4),
            settings=ServerSettings(),
            base_name="nano",
            training=training,
        ),
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
    for path in ("/v1/training/pause", "/v1/training/resume", "/v1/training/update", "/training/checkpoint"):
        answer = call("POST", path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "unavailable")
    assert call("POST", "/v1/training/pause", json={"now": 1}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/training/update", "/v1/training/checkpoint"])
def test_who_waits_for_a_step_has_a_deadline_and_may_leave(
    client: TestClient, training: FakeTraining, path: str
) -> None:
    training.is_endless = True
    answer = client.post(path, headers={"x-request-timeout": "0.05"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
