"""`/v1/predict` and KServe's `/v2` with policy nets that compute."""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import UnknownModel
from parallm.server.openapi import DOCUMENTS
from parallm.server.settings import ServerSettings
from parallm.tasks.actor import Actor
from parallm.tensors import Arrays, Signature, TensorSpec
from tests.server.conftest import CharacterTokenizer, EchoEngine, card, make_app
from tests.tasks.policy_files import LSTM, MLP, layers, policy_file, weights_of

OBS = np.array([[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]], np.float32)
LOGITS = layers(weights_of(MLP), "actor", OBS.astype(np.float64), is_last_plain=True)
INPUT = {"name": "obs", "shape": [2, 4], "datatype": "FP32", "data": OBS.ravel().tolist()}
Send = Callable[..., Any]


@pytest.fixture
def client(engine: EchoEngine, tokenizer: CharacterTokenizer) -> Iterator[TestClient]:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    actor = Actor(device, max_names=4, max_waiting=8)
    app = make_app(
        engine,
        tokenizer,
        actor=actor,
        settings=ServerSettings(max_answer_bytes=1024),
        catalog=lambda: (card(3), card(2)),
    )
    with TestClient(app, base_url="http://localhost") as client:
        client.put("/v1/rl/policies/agent", content=policy_file(MLP))
        yield client
    device.stop()


@pytest.fixture
def predict(client: TestClient) -> Send:
    return lambda **body: client.post("/v1/predict", json={"model": "agent", "inputs": OBS.tolist()} | body)


@pytest.fixture
def infer(client: TestClient) -> Send:
    return lambda **body: client.post("/v2/models/agent/infer", json={"inputs": [INPUT]} | body)


def close(tensor: dict[str, Any], expected: np.ndarray) -> bool:
    return bool(np.allclose(np.reshape(tensor["data"], tensor["shape"]), expected, atol=1e-5))


def test_a_prediction_has_all_outputs_of_the_signature(predict: Send) -> None:
    answer = predict().json()
    assert (answer["object"], answer["model"], answer["model_version"]) == ("prediction", "agent@1", "1")
    assert {name: tensor["shape"] for name, tensor in answer["outputs"].items()} == {"logits": [2, 3], "value": [2]}
    assert close(answer["outputs"]["logits"], LOGITS)


def test_outputs_may_be_named_and_the_model_called_model_id(client: TestClient) -> None:
    body = {"model_id": "agent@1", "inputs": {"obs": {"data": OBS.tolist()}}, "outputs": ["value"], "encoding": "b64"}
    assert list(client.post("/v1/predict", json=body).json()["outputs"]) == ["value"]
    both = client.post("/v1/predict", json=body | {"model": "agent"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "model_id")


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"outputs": ["q"]}, 400, "agent has no output 'q'; it has logits, value"),
        ({"outputs": []}, 400, "ask for one of the outputs logits, value"),
        ({"outputs": ["value", "value"]}, 400, "asked for twice"),
        ({"inputs": {"x": OBS.tolist()}}, 400, "inputs has no tensor 'x'; it has obs"),
        ({"inputs": OBS.tolist() * 64}, 400, r"would have 2048 bytes (logits 1536, value 512), the limit is 1024"),
        ({"model": "agent@7"}, 404, "of agent there are agent@1"),
        ({"model": "other"}, 404, "no policy net 'other'"),
        ({"temperature": 1}, 400, "unknown field 'temperature'"),
    ],
)
def test_what_is_wrong_is_refused(predict: Send, fields: dict[str, Any], status: int, message: str) -> None:
    response = predict(**fields)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_answers_of_actions_have_the_same_limit(client: TestClient) -> None:
    body = {"model": "agent", "observations": OBS.tolist() * 64}
    assert "server.max_answer_bytes" in client.post("/v1/rl/act", json=body).json()["error"]["message"]


def test_a_name_of_an_adapter_and_of_a_net_is_refused(client: TestClient, engine: EchoEngine) -> None:
    actor: Any = type("Actor", (), {"cards": lambda self: (card(1),)})()
    app = make_app(engine, CharacterTokenizer(), actor=actor, catalog=lambda: (card(3),))
    response = TestClient(app, base_url="http://localhost").post("/v1/predict", json={"model": "policy", "inputs": [1]})
    assert "policy is an adapter and a policy net" in response.json()["error"]["message"]


def test_kserves_answer_is_in_its_form(infer: Send) -> None:
    answer = infer(id="a1").json()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("agent", "1", "a1")
    assert [(one["name"], one["datatype"], one["shape"]) for one in answer["outputs"]] == [
        ("logits", "FP32", [2, 3]),
        ("value", "FP32", [2]),
    ]
    assert close(answer["outputs"][0], LOGITS)


def test_tensors_travel_as_bytes_behind_the_json(client: TestClient) -> None:
    tensor = {"name": "obs", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    asked = [{"name": "value", "parameters": {"binary_data": False}}, {"name": "logits"}]
    body = {"inputs": [tensor], "outputs": asked, "parameters": {"binary_data_output": True}}
    text = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    response = client.post("/v2/models/agent/versions/1/infer", content=text + OBS.tobytes(), headers=headers)
    length = int(response.headers["inference-header-content-length"])
    value, logits = json.loads(response.content[:length])["outputs"]
    assert len(value["data"]) == 2
    assert logits["parameters"] == {"binary_data_size": 24}
    assert "data" not in logits
    found = struct.unpack("<6f", response.content[length:])
    np.testing.assert_allclose(np.reshape(found, (2, 3)), LOGITS, atol=1e-5)
    cut = client.post("/v2/models/agent/infer", content=text + OBS.tobytes()[:-1], headers=headers)
    assert (cut.status_code, cut.json()) == (400, {"error": "inputs.obs has 31 bytes; FP32 [2, 4] has 32"})
    more = client.post("/v2/models/agent/infer", content=text + OBS.tobytes() + b"x", headers=headers)
    assert more.json() == {"error": "33 bytes follow the JSON, and the inputs' binary_data_size are 32"}
    for length_given in ("-1", "x", "99999", "1" * 30):
        wrong = client.post(
            "/v2/models/agent/infer", content=text, headers={"Inference-Header-Content-Length": length_given}
        )
        assert "Inference-Header-Content-Length" in wrong.json()["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": []}, "the input obs is missing"),
        ({"inputs": [INPUT, INPUT]}, "the input obs is there twice"),
        ({"inputs": [INPUT | {"name": "x"}]}, "no input 'x'; it has obs"),
        ({"inputs": [INPUT | {"datatype": "FP64"}]}, "inputs.obs is FP64, and this model takes FP32"),
        ({"inputs": [INPUT | {"datatype": "BYTES"}]}, "inputs.obs has the datatype 'BYTES'; there are BOOL"),
        ({"inputs": [INPUT | {"parameters": {"binary_data_size": 32}}]}, "either data or the parameter"),
        ({"inputs": [INPUT | {"parameters": {"shared_memory_region": "r"}}]}, "shared_memory_region"),
        ({"inputs": [INPUT | {"shape": [2, -4]}]}, "greater than or equal to 0"),
        ({"inputs": [INPUT | {"shape": [1 << 40, 4]}]}, "the limit is 4096"),
        ({"outputs": [{"name": "q"}]}, "no output 'q'"),
        ({"parameters": {"priority": 1}}, "priority"),
    ],
)
def test_kserves_errors_name_the_fault(infer: Send, body: dict[str, Any], message: str) -> None:
    response = infer(**body)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert message in response.json()["error"]


def test_models_and_versions_are_described(client: TestClient) -> None:
    client.put("/v1/rl/policies/agent", content=policy_file(LSTM))
    found = client.get("/v2/models/agent").json()
    assert (found["name"], found["versions"], found["platform"]) == ("agent", ["1", "2"], "parallm")
    assert [(one["name"], one["datatype"], one["shape"]) for one in found["inputs"]] == [
        ("obs", "FP32", [-1, 4]),
        ("h", "FP32", [-1, 5]),
        ("c", "FP32", [-1, 5]),
        ("episode_start", "BOOL", [-1]),
    ]
    assert [one["name"] for one in found["outputs"]] == ["logits", "value", "h", "c"]
    assert len(client.get("/v2/models/agent/versions/1").json()["inputs"]) == 1
    for path in ("/ready", "/versions/2/ready"):
        assert client.get(f"/v2/models/agent{path}").json() == {"name": "agent", "ready": True}
    missing = client.get("/v2/models/agent/versions/3/ready")
    assert (missing.status_code, missing.json()) == (
        404,
        {"error": "no version 'agent@3'; of agent there are agent@1, agent@2"},
    )
    assert client.get("/v2/models/agent/versions/x").status_code == 400
    assert client.get("/v2/models/other").status_code == 404


def test_the_server_is_described(client: TestClient, engine: EchoEngine) -> None:
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    engine.is_alive = False
    assert client.get("/v2/health/ready").status_code == 503


def test_compressed_bodies_are_refused_by_name(client: TestClient) -> None:
    response = client.post("/v2/models/agent/infer", content=b"x", headers={"Content-Encoding": "gzip"})
    assert response.json() == {"error": "compressed bodies are not read; send this one as it is"}


def test_every_example_of_the_documents_is_accepted(client: TestClient) -> None:
    for row, path in (
        ("POST /v1/predict", "/v1/predict"),
        ("POST /v2/models/{name}/infer", "/v2/models/agent/infer"),
        ("POST /v2/models/{name}/versions/{version}/infer", "/v2/models/agent/versions/1/infer"),
    ):
        for body in (DOCUMENTS[row].example, *DOCUMENTS[row].more_examples.values()):
            assert client.post(path, json=body).status_code == 200


class ZeroPredictor:
    """Logits of zeros for a vocabulary of five; it refuses signatures before it is prepared."""

    is_prepared = False

    async def prepare(self) -> None:
        self.is_prepared = True

    def signature(self, model: str) -> Signature:
        assert self.is_prepared
        if model not in ("base", "policy@3", "policy@2"):
            raise UnknownModel(f"no model {model}")
        ids = TensorSpec(name="input_ids", datatype="INT64", shape=(-1, -1))
        mask = TensorSpec(name="attention_mask", datatype="INT64", shape=(-1, -1), is_optional=True)
        return Signature(inputs=(ids, mask), outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, -1, 5)),))

    async def predict(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> Arrays:
        return {name: np.zeros((*inputs["input_ids"].shape, 5), np.float32) for name in outputs}


@pytest.fixture
def language(engine: EchoEngine, tokenizer: CharacterTokenizer) -> TestClient:
    app = make_app(
        engine,
        tokenizer,
        predictor=ZeroPredictor(),
        settings=ServerSettings(max_answer_bytes=1024),
        catalog=lambda: (card(3), card(2, "best")),
    )
    return TestClient(app, base_url="http://localhost")


@pytest.mark.parametrize(
    ("model", "exact", "version"), [("base", "base", "0"), ("policy", "policy@3", "3"), ("best", "policy@2", "2")]
)
def test_the_base_and_its_adapters_take_token_ids(language: TestClient, model: str, exact: str, version: str) -> None:
    answer = language.post("/v1/predict", json={"model": model, "inputs": [[1, 2, 3]]}).json()
    assert (answer["model"], answer["model_version"]) == (exact, version)
    assert answer["outputs"]["logits"]["shape"] == [1, 3, 5]


def test_the_language_model_has_kserves_form_too(language: TestClient) -> None:
    found = language.get("/v2/models/policy").json()
    assert found["versions"] == ["2", "3"]
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1, 5]}]
    body = {"inputs": [{"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}]}
    answer = language.post("/v2/models/policy/versions/2/infer", json=body).json()
    assert (answer["model_name"], answer["model_version"]) == ("policy", "2")
    assert language.get("/v2/models/base/ready").status_code == 200
    assert language.get("/v2/models/poet/ready").status_code == 404


def test_tokens_count_in_the_size_of_an_answer(language: TestClient) -> None:
    body = {"model": "base", "inputs": {"input_ids": [[1] * 20] * 3}}
    message = language.post("/v1/predict", json=body).json()["error"]["message"]
    assert "would have 1200 bytes (logits 1200), the limit is 1024" in message


def test_a_name_that_is_split_is_refused(language: TestClient) -> None:
    language.put("/v1/splits/policy", json={"weights": {"policy@2": 1, "policy@3": 1}})
    response = language.post("/v1/predict", json={"model": "policy", "inputs": [[1]]})
    assert "policy is split between versions" in response.json()["error"]["message"]
