"""Metrics of the device, and its shares."""

from collections.abc import Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.reports import TrainingStatus
from tests.server.conftest import make_app


class FakeDevice:
    def __init__(self) -> None:
        self._shares = {"serving_share": 0.7, "engine_share": 0.5}

    def seconds(self) -> Mapping[str, float]:
        return {"serving": 3.0}

    def memory(self) -> Mapping[str, int]:
        return {"active": 10, "peak": 30, "cache": 5}

    def usage(self) -> Mapping[str, float]:
        return {"process": 0.5, "accelerator": 0.9}

    def shares(self) -> Mapping[str, float]:
        return self._shares

    def set_shares(self, **shares: float | None) -> None:
        self._shares |= {name: share for name, share in shares.items() if share is not None}


def client_of(engine: Any, tokenizer: Any, device: FakeDevice | None) -> TestClient:
    return TestClient(
        make_app(engine, tokenizer, status=lambda: TrainingStatus(state="updating", checkpoint_saves=4), device=device),
        base_url="http://localhost",
    )


@pytest.fixture
def client(engine: Any, tokenizer: Any) -> TestClient:
    return client_of(engine, tokenizer, FakeDevice())


def test_shares_are_changed_while_the_process_runs_and_show_in_status_and_metrics(client: TestClient) -> None:
    assert client.get("/v1/shares").json() == {"serving_share": 0.7, "engine_share": 0.5}
    changed = {"serving_share": 0.7, "engine_share": 1.0}
    assert client.put("/v1/shares", json={"engine_share": 1}).json() == changed
    assert client.get("/v1/shares").json() == changed
    assert client.get("/v1/training/status").json()["shares"] == changed
    assert 'parallm:device_share{share="engine_share"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"engine_share": 1.1},
        {"serving_share": -0.1},
        {"engine_share": None},
        {"serving_latency_target": 0.9},
        {"x": 1},
    ],
)
def test_what_is_no_share_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    assert client.put("/v1/shares", json=body).status_code == 400
    assert client.get("/v1/shares").json() == {"serving_share": 0.7, "engine_share": 0.5}


def test_a_latency_target_of_serving_is_set_and_ended(client: TestClient) -> None:
    shares = {"serving_share": 0.7, "engine_share": 0.5}
    assert client.put("/v1/shares", json={"serving_latency_target": 1.2}).json() == {
        **shares,
        "serving_latency_target": 1.2,
    }
    assert 'parallm:device_share{share="serving_latency_target"} 1.2' in client.get("/metrics").text
    assert client.put("/v1/shares", json={"serving_latency_target": 0}).json()["serving_latency_target"] == 0


def test_a_process_without_a_device_says_so(engine: Any, tokenizer: Any) -> None:
    client = client_of(engine, tokenizer, None)
    answers = [client.get("/v1/shares"), client.put("/v1/shares", json={"engine_share": 1})]
    assert [answer.status_code for answer in answers] == [409, 409]


def test_metrics_tell_of_memory_use_and_checkpoints(client: TestClient) -> None:
    text = client.get("/metrics").text
    for line in (
        'parallm:device_memory_bytes{kind="active"} 10.0',
        'parallm:device_memory_bytes{kind="peak"} 30.0',
        'parallm:device_memory_bytes{kind="cache"} 5.0',
        'parallm:cpu_usage_ratio{of="process"} 0.5',
        "parallm:accelerator_usage_ratio 0.9",
        'parallm:device_seconds_total{work="serving"} 3.0',
        'checkpoint_saves_total{policy="policy"} 4.0',
    ):
        assert f"\n{line}\n" in text
