from collections.abc import Callable
from typing import Any

import httpx
from fastapi.testclient import TestClient

from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.settings import ServerSettings

Call = Callable[..., httpx.Response]


def test_health_says_what_runs_and_waits(call: Call) -> None:
    assert call("GET", "/health").json() == {"status": "ok", "num_running": 0, "num_waiting": 0}


def test_models_are_the_base_names_aliases_and_versions(call: Call) -> None:
    models = {entry["id"]: entry for entry in call("GET", "/v1/models").json()["data"]}
    assert list(models) == ["base", "best", "policy", "policy@3", "policy@2"]
    assert [entry["policy_version"] for entry in models.values()] == [0, 2, 3, 3, 2]
    assert [entry["parent"] for entry in models.values()] == [None, "policy@1", "policy@2", "policy@2", "policy@1"]
    assert {(entry["root"], entry["max_model_len"]) for entry in models.values()} == {("nano", 200)}


def test_one_model_is_the_entry_of_the_list(call: Call) -> None:
    for entry in call("GET", "/v1/models").json()["data"]:
        assert call("GET", f"/v1/models/{entry['id']}").json() == entry
    assert call("GET", "/v1/models/other").status_code == 404


def test_several_policies_are_in_the_list_before_their_first_version_and_each_in_the_status(
    engine: Any, tokenizer: Any
) -> None:
    poet, coder = TrainingStatus(state="starting"), TrainingStatus(state="updating", step=2, metrics={"loss": 0.5})
    app = create_app(
        engine=engine,
        tokenizer=tokenizer,
        catalog=tuple,
        status=lambda: TrainingStatus(state="starting", policies={"poet": poet, "coder": coder}),
        settings=ServerSettings(),
        base_name="nano",
        policies=("poet", "coder"),
    )
    with TestClient(app) as client:
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["base", "coder", "poet"]
        policies = client.get("/v1/training/status").json()["policies"]
    assert [(name, one["state"], one["step"]) for name, one in policies.items()] == [
        ("poet", "starting", 0),
        ("coder", "updating", 2),
    ]
    assert policies["coder"]["metrics"] == {"loss": 0.5}


def test_training_status_is_json_even_where_a_metric_is_not_a_number(call: Call) -> None:
    assert call("GET", "/v1/training/status").json() == {
        "state": "updating",
        "step": 4,
        "total_steps": 9,
        "version": 3,
        "seconds_left": None,
        "metrics": {"loss": None},
        "message": "",
        "policies": {},
    }
