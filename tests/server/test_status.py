from collections.abc import Callable
from typing import Any

import httpx
from fastapi.testclient import TestClient

from parallm.reports import TrainingStatus
from tests.server.conftest import make_app

Call = Callable[..., httpx.Response]


def test_health_says_what_runs_and_waits(call: Call) -> None:
    assert call("GET", "/health").json() == {"status": "ok", "model_loaded": True, "num_running": 0, "num_waiting": 0}


def test_models_are_the_base_names_aliases_and_versions(call: Call) -> None:
    models = {entry["id"]: entry for entry in call("GET", "/v1/models").json()["data"]}
    assert list(models) == ["policy", "base", "best", "policy@3", "policy@2"]
    assert [entry["policy_version"] for entry in models.values()] == [3, 0, 2, 3, 2]
    assert [entry["parent"] for entry in models.values()] == ["policy@2", None, "policy@1", "policy@2", "policy@1"]
    assert {(entry["root"], entry["max_model_len"]) for entry in models.values()} == {("nano", 200)}


def test_one_model_is_the_entry_of_the_list(call: Call) -> None:
    for entry in call("GET", "/v1/models").json()["data"]:
        assert call("GET", f"/v1/models/{entry['id']}").json() == entry
    assert call("GET", "/v1/models/policy@latest").json()["policy_version"] == 3
    assert call("GET", "/v1/models/other").status_code == 404


def test_several_policies_are_in_the_list_before_their_first_version_and_each_in_the_status(
    engine: Any, tokenizer: Any
) -> None:
    poet, coder = TrainingStatus(state="starting"), TrainingStatus(state="updating", step=2, metrics={"loss": 0.5})
    app = make_app(
        engine,
        tokenizer,
        status=lambda: TrainingStatus(state="starting", policies={"poet": poet, "coder": coder}),
        policies=("poet", "coder"),
    )
    with TestClient(app, base_url="http://localhost") as client:
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["poet", "coder", "base"]
        policies = client.get("/v1/training/status").json()["policies"]
    assert [(name, one["state"], one["step"]) for name, one in policies.items()] == [
        ("poet", "starting", 0),
        ("coder", "updating", 2),
    ]
    assert policies["coder"]["metrics"] == {"loss": 0.5}


def test_frameworks_learn_what_runs_here_and_which_weights(call: Call, engine: Any) -> None:
    for path in ("/get_world_size", "/get_world_size/"):
        assert call("GET", path).json() == {"world_size": 1}
    for path in ("/weight_info", "/get_weight_version"):
        assert call("GET", path).json() == {"weight_version": "3"}
    info = call("GET", "/get_model_info").json()
    assert info == call("GET", "/model_info").json()
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == ("nano", "policy", "3")
    assert call("GET", "/health_generate").json() == {"status": "ok"}
    assert (engine.requests[0].model, engine.requests[0].sampling.max_tokens) == ("base", 1)
    engine.is_alive = False
    assert call("GET", "/health_generate").status_code == 503


def test_pushing_weights_is_refused_with_the_way_by_adapters(call: Call) -> None:
    for path in ("/init_communicator/", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors"):
        answer = call("POST", path, json={"any": "thing"})
        assert answer.status_code == 409
        assert "/load_lora_adapter" in answer.json()["error"]["message"]


def test_training_status_is_json_even_where_a_metric_is_not_a_number(call: Call) -> None:
    assert call("GET", "/v1/training/status").json() == {
        "state": "updating",
        "step": 4,
        "total_steps": 9,
        "version": 3,
        "seconds_left": None,
        "metrics": {"loss": None},
        "message": "",
        "last_update": None,
        "trajectories_collected": 0,
        "checkpoint_saves": 0,
        "training_enabled": True,
        "current_lora": "checkpoint-3",
        "loss": None,
        "available_checkpoints": ["checkpoint-2", "checkpoint-3"],
        "shares": {},
        "policies": {},
    }
