"""`/v1/rl/act` and the versions of policy nets over HTTP, with nets that compute."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.server.openapi import DOCUMENTS
from parallm.server.settings import ServerSettings
from parallm.tasks.actor import Actor
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app
from tests.tasks.policy_files import BOX, LSTM, MLP, policy_file, weights_of

OBS = [[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]]
Send = Callable[..., Any]


@pytest.fixture
def client(engine: EchoEngine, tokenizer: CharacterTokenizer) -> Iterator[TestClient]:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    actor = Actor(device, max_names=4, max_waiting=8)
    settings = ServerSettings(max_adapter_bytes=20_000)
    with TestClient(make_app(engine, tokenizer, actor=actor, settings=settings), base_url="http://localhost") as client:
        client.put("/v1/rl/policies/agent", content=policy_file(MLP))
        yield client
    device.stop()


@pytest.fixture
def act(client: TestClient) -> Send:
    def send(observations: Any = OBS, **fields: Any) -> Any:
        return client.post("/v1/rl/act", json={"model": "agent", "observations": observations, **fields})

    return send


def numbers(tensor: dict[str, Any]) -> np.ndarray:
    if "b64" in tensor:
        kind = {"FP32": "<f4", "INT64": "<i8"}[tensor["datatype"]]
        return np.frombuffer(base64.b64decode(tensor["b64"]), kind).reshape(tensor["shape"])
    return np.array(tensor["data"]).reshape(tensor["shape"])


def test_an_answer_names_the_version_that_acted_and_its_seed(act: Send) -> None:
    answer = act(seed=7).json()
    assert (answer["object"], answer["model"], answer["policy_version"]) == ("rl.actions", "agent@1", 1)
    assert answer["id"].startswith("act-")
    assert (answer["seed"], answer["usage"]) == (7, {"rows": 2})
    assert (answer["actions"]["datatype"], answer["actions"]["shape"]) == ("INT64", [2])
    assert {"action_log_probs", "value_estimates"} < answer.keys()
    assert "entropy" not in answer


def test_an_answer_without_a_seed_has_the_one_that_was_used(act: Send) -> None:
    answer = act(OBS * 8).json()
    assert act(OBS * 8, seed=answer["seed"]).json()["actions"] == answer["actions"]
    assert act(OBS * 8).json()["seed"] != answer["seed"]


def test_each_row_may_have_a_seed_of_its_own(act: Send) -> None:
    together = act(OBS * 8, seed=list(range(16))).json()
    assert together["seed"] == list(range(16))
    alone = [act([OBS[row % 2]], seed=[row]).json()["actions"]["data"][0] for row in range(16)]
    assert together["actions"]["data"] == alone


def test_both_forms_of_an_answer_are_the_same_numbers(act: Send) -> None:
    plain, packed = (act(seed=7, encoding=form, **{"return": ["entropy"]}).json() for form in ("json", "b64"))
    for name in ("actions", "entropy"):
        np.testing.assert_array_equal(numbers(plain[name]).astype(np.float32), numbers(packed[name]))
    assert "action_log_probs" not in plain


def test_versions_are_pinned_and_named(client: TestClient, act: Send) -> None:
    old = act(seed=7).json()["action_log_probs"]
    entry = client.put("/v1/rl/policies/agent", content=policy_file(None, weights_of(MLP, 1))).json()
    assert (entry["id"], entry["is_served"], entry["model_type"]) == ("agent@2", True, "mlp_policy")
    assert entry["inputs"] == [{"name": "obs", "datatype": "FP32", "shape": [-1, 4]}]
    newest, pinned = act(seed=7).json(), act(seed=7, model="agent@1").json()
    assert (newest["policy_version"], pinned["policy_version"]) == (2, 1)
    assert pinned["action_log_probs"] == old != newest["action_log_probs"]
    assert [entry["id"] for entry in client.get("/v1/rl/policies").json()["data"]] == ["agent@1", "agent@2"]
    assert client.delete("/v1/rl/policies/agent@1").json() == {"status": "ok"}
    refused = act(model="agent@1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "of agent there are agent@2" in refused.json()["error"]["message"]


def test_hidden_states_travel_with_the_client(client: TestClient, act: Send) -> None:
    client.put("/v1/rl/policies/agent", content=policy_file(LSTM))
    first = act(deterministic=True).json()
    hidden = first["new_hidden_states"]
    assert {name: tensor["shape"] for name, tensor in hidden.items()} == {"h": [2, 5], "c": [2, 5]}
    second = act(deterministic=True, hidden_states=hidden).json()
    assert second["new_hidden_states"] != hidden
    again = act(deterministic=True, hidden_states=hidden, episode_start=[True, True]).json()
    assert again["new_hidden_states"] == hidden
    half = act(deterministic=True, hidden_states=hidden, episode_start=[True, False], encoding="b64").json()
    np.testing.assert_array_equal(
        numbers(half["new_hidden_states"]["h"]),
        np.stack([numbers(hidden["h"])[0], numbers(second["new_hidden_states"]["h"])[1]]).astype(np.float32),
    )


def test_a_box_has_actions_for_the_learner_and_for_the_environment(client: TestClient, act: Send) -> None:
    client.put("/v1/rl/policies/agent", content=policy_file(BOX | {"critic": None}))
    answer = act(OBS * 8, seed=1).json()
    actions, clipped = numbers(answer["actions"]), numbers(answer["clipped_actions"])
    np.testing.assert_array_equal(clipped, np.clip(actions, [-0.5, -0.5], [1, 2]))
    assert (clipped != actions).any()
    assert "value_estimates" not in answer
    refused = act(**{"return": ["value_estimates"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"observations": [[1, 2, 3]]}, "observations", r"has the shape [1, 3]; it should be [-1, 4]"),
        ({"observations": {"pixels": OBS}}, "observations", "no tensor 'pixels'; it has obs"),
        ({"observations": {}}, "observations", "the tensor obs is missing"),
        ({"observations": {"obs": OBS, "h": OBS}}, "observations", "no tensor 'h'"),
        ({"hidden_states": {"h": OBS}}, "hidden_states", "no tensor 'h'"),
        ({"episode_start": [True]}, "episode_start", "1 rows, and observations have 2"),
        ({"seed": [1]}, "seed", "1 numbers for 2 rows"),
        ({"seed": -1}, "seed", "from 0 to 2^64 - 1"),
        ({"seed": [0, 1 << 64]}, "seed", "from 0 to 2^64 - 1"),
        ({"return": ["actions"]}, "return.0", "'action_log_probs', 'value_estimates' or 'entropy'"),
        ({"returns": []}, "returns", "did you mean 'return'?"),
        ({"encoding": "pickle"}, "encoding", "'json' or 'b64'"),
        ({"temperature": 1}, "temperature", "unknown field"),
    ],
)
def test_what_is_wrong_is_refused_by_name(act: Send, fields: dict[str, Any], param: str, message: str) -> None:
    response = act(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert message in response.json()["error"]["message"]


def test_hidden_states_of_other_rows_are_refused(client: TestClient, act: Send) -> None:
    client.put("/v1/rl/policies/agent", content=policy_file(LSTM))
    message = act(hidden_states={"h": [[0.0] * 5]}).json()["error"]["message"]
    assert message == "tensors have different numbers of rows: obs 2, h 1"


@pytest.mark.parametrize("model", ["base", "policy", "other", "agent@0", "agent@x", "agent@" + "9" * 30])
def test_names_of_no_policy_net_are_refused(act: Send, model: str) -> None:
    assert act(model=model).status_code == 404


def test_uploads_are_limited_and_checked(client: TestClient) -> None:
    large = policy_file(MLP | {"actor": [1024]})
    refused = client.put("/v1/rl/policies/agent", content=large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    wrong = client.put("/v1/rl/policies/agent", content=b"\x80\x04pickle")
    assert wrong.status_code == 400
    assert "pickled files are never read" in wrong.json()["error"]["message"]
    assert client.delete("/v1/rl/policies/other").status_code == 404


def test_numbers_that_are_not_finite_are_an_error_and_no_json(client: TestClient, act: Send) -> None:
    weights = weights_of(MLP)
    weights["actor.2.bias"][:] = weights["actor.2.weight"][:] = 3e38
    client.put("/v1/rl/policies/agent", content=policy_file(None, weights))
    response = act()
    assert (response.status_code, response.json()["error"]["code"]) == (422, "not_finite")


def test_a_process_without_policy_nets_says_so(engine: EchoEngine, tokenizer: CharacterTokenizer) -> None:
    client = TestClient(make_app(engine, tokenizer), base_url="http://localhost")
    for response in (
        client.post("/v1/rl/act", json={"model": "agent", "observations": OBS}),
        client.get("/v1/rl/policies"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (409, "unavailable")


def test_every_example_of_the_documents_is_accepted(client: TestClient) -> None:
    for path in ("/v1/rl/act", "/v1/rl/rollout"):
        document = DOCUMENTS[f"POST {path}"]
        for body in (document.example, *document.more_examples.values()):
            assert client.post(path, json=body).status_code == 200
