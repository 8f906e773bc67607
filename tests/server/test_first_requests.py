"""Requests of the first users' programs, sent as these programs send them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from parallm.errors import UnknownModel
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard
from tests.server.conftest import make_app, send_to

Call = Callable[..., httpx.Response]


GENERATE = {
    "prompt": "hello",
    "temperature": 0.7,
    "top_p": 1.0,
    "max_tokens": 128,
    "logprobs": 1,
    "policy_version": 42,
    "step_id": 1000,
    "request_id": "unique-request-id",
}


def test_generate_echoes_the_version_that_its_trainer_believes_in_beside_the_one_that_sampled(call: Call) -> None:
    answer = call("POST", "/generate", json=GENERATE).json()
    metadata = answer.pop("metadata")
    tokens = [*map(ord, "hello 0"), 0]
    assert answer == {
        "request_id": "unique-request-id",
        "policy_version": 42,
        "step_id": 1000,
        "prompt_ids": [*map(ord, "hello")],
        "completion_ids": tokens,
        "text": "hello 0",
        "logprobs": [-0.25] * len(tokens),
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
        "model": "policy@3",
    }
    assert (metadata["batch_size"], metadata["current_policy_version"]) == (1, 3)
    assert metadata["latency_ms"] > 0
    assert call("POST", "/generate", json=GENERATE | {"policy_version": None}).json()["policy_version"] == 3
    alone = call("POST", "/generate", json={"prompt": "hello", "logprobs": 1}).json()
    assert alone["policy_version"] == 3


def test_generate_answers_several_prompts_with_a_list(call: Call) -> None:
    for prompts in (["hello", "hi"], [[104, 101], [104]]):
        answers = call("POST", "/generate", json=GENERATE | {"prompt": prompts}).json()
        assert [len(one["prompt_ids"]) for one in answers] == [len(prompt) for prompt in prompts]
        assert {one["policy_version"] for one in answers} == {42}
        assert {one["metadata"]["batch_size"] for one in answers} == {2}
    assert len(call("POST", "/generate", json=GENERATE | {"prompt": ["hello"]}).json()) == 1
    assert len(call("POST", "/generate", json=GENERATE | {"n": 3}).json()) == 3
    assert isinstance(call("POST", "/generate", json=GENERATE | {"prompt": [104, 101]}).json(), dict)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"policy_version": -1}, "policy_version"),
        ({"policy_version": "42"}, "policy_version"),
        ({"logprobs": 2}, "logprobs"),
        ({"stream": True}, "stream"),
        ({"prompt": []}, "prompt"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_generate_refuses_by_name_what_has_no_place(call: Call, fields: dict[str, Any], parameter: str) -> None:
    answer = call("POST", "/generate", json=GENERATE | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


@dataclass
class Adapters:
    """Makes version 43 of whatever comes, and remembers it."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    splits: dict[str, Mapping[str, float]] = field(default_factory=dict)

    async def load(self, name: str, path: str) -> AdapterCard:
        return self._made("load", name, path)

    async def upload(self, name: str, archive: bytes) -> AdapterCard:
        return self._made("upload", name, archive)

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        return self._made("update", name, weights)

    async def promote(self, name: str, version: int) -> None:
        if version == 9:
            raise UnknownModel("no version policy@9; there are base, policy, policy@2, policy@3")
        self._made("promote", name, version)

    async def set_splits(self, splits: Mapping[str, Mapping[str, float]]) -> None: ...

    def _made(self, *call: Any) -> AdapterCard:
        self.calls.append(call)
        return card("policy" if call[1] == "policy" else "poet", 43)


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


@pytest.fixture
def served(engine: Any, tokenizer: Any, adapters: Adapters) -> TestClient:
    """A process that serves two versions of the policy."""
    return TestClient(
        make_app(
            engine,
            tokenizer,
            catalog=lambda: (card("policy", 3), card("policy", 2, "best")),
            settings=ServerSettings(max_adapter_bytes=2048),
            base_name="models/Llama-3-8B",
            adapters=adapters,
        ),
        base_url="http://localhost",
    )


def card(name: str, version: int, *aliases: str) -> AdapterCard:
    return AdapterCard(
        name=name,
        version=version,
        parent=None,
        step=0,
        rank=8,
        alpha=16.0,
        aliases=aliases,
        digest="00",
        num_running=0,
        is_served=not aliases,
    )


def test_load_adapter_without_a_name_moves_the_policy(served: TestClient, adapters: Adapters) -> None:
    answer = served.post("/load_adapter", json={"adapter_path": "runs/adapter"})
    assert answer.json() == {
        "status": "success",
        "policy_version": 43,
        "message": "Loaded adapter from runs/adapter",
    }
    assert adapters.calls == [("load", "policy", "runs/adapter")]
    assert served.post("/load_adapter", json={"adapter_path": "a", "adapter_name": "poet"}).json()["id"] == "poet@43"
    for body, parameter in (({}, "path"), ({"adapter_path": ""}, "path"), ({"adapter_path": "a", "x": 1}, "x")):
        assert served.post("/load_adapter", json=body).json()["error"]["param"] == parameter


@pytest.mark.parametrize(("content", "how"), [(b"PK\x03\x04zip", "upload"), (b"tensors", "update")])
def test_upload_adapter_takes_a_form_with_the_file(
    served: TestClient, adapters: Adapters, content: bytes, how: str
) -> None:
    answer = served.post("/upload_adapter", files={"file": ("adapter.zip", content)})
    assert answer.json() == {
        "status": "success",
        "policy_version": 43,
        "message": "Loaded adapter from adapter.zip",
    }
    named = served.post("/upload_adapter", files={"adapter": ("a", content)}, data={"adapter_name": "poet"})
    assert named.json()["id"] == "poet@43"
    assert adapters.calls == [(how, "policy", content), (how, "poet", content)]


def test_a_form_that_is_too_large_is_cut_off_while_it_streams(served: TestClient, adapters: Adapters) -> None:
    sent: list[bytes] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(50):
            sent.append(b"a" * 1000)
            yield sent[-1]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            form = {"content-type": "multipart/form-data; boundary=x"}
            return await client.post("/upload_adapter", content=chunks(), headers=form)

    answer = asyncio.run(send())
    assert answer.status_code == 413
    assert "server.max_adapter_bytes" in answer.json()["error"]["message"]
    assert (len(sent), adapters.calls) == (2, [])


@pytest.mark.parametrize(
    ("content_type", "content", "parameter"),
    [
        ("multipart/form-data", b"", None),
        ("multipart/form-data; boundary=x", b"no form", None),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "file"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="rank"\r\n\r\n8\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nb\r\n--x--\r\n',
            "rank",
        ),
    ],
)
def test_forms_that_are_none_are_refused(
    served: TestClient, adapters: Adapters, content_type: str, content: bytes, parameter: str | None
) -> None:
    answer = served.post("/upload_adapter", content=content, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
    assert not adapters.calls


@pytest.mark.parametrize(
    ("version", "number"),
    [("checkpoint-3", 3), ("3", 3), ("policy@3", 3), ("best-performance", 2), ("best", 2), ("latest", 3), (2, 2)],
)
def test_switch_lora_knows_versions_by_words(
    served: TestClient, adapters: Adapters, version: object, number: int
) -> None:
    answer = served.post("/model/switch-lora", json={"version": version})
    assert answer.json() == {"name": "policy", "version": number}
    assert adapters.calls == [("promote", "policy", number)]


def test_switch_lora_to_what_is_not_there_is_404_with_the_versions(served: TestClient) -> None:
    for version in ("checkpoint-9", 9):
        answer = served.post("/model/switch-lora", json={"version": version})
        assert (answer.status_code, "policy@2, policy@3" in answer.text) == (404, True)
    answer = served.post("/model/switch-lora", json={"version": "final"})
    assert answer.status_code == 404
    assert "there are checkpoint-2, checkpoint-3" in answer.json()["error"]["message"]


PROMPTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/responses", {"input": "hello"}),
    ("/generate", {"prompt": "hello"}),
]


@pytest.mark.parametrize(("path", "prompt"), PROMPTED)
@pytest.mark.parametrize(
    ("lora_adapter", "answers"),
    [("checkpoint-2", "policy@2"), ("best-performance", "policy@2"), ("latest", "policy@3"), ("policy", "policy@3")],
)
def test_lora_adapter_is_another_word_for_the_version(
    served: TestClient, path: str, prompt: dict[str, Any], lora_adapter: str, answers: str
) -> None:
    for model in ("base-model", "base", "models/Llama-3-8B", "policy", answers):
        body = {"model": model, "lora_adapter": lora_adapter, **prompt}
        answer = served.post(path, json=body).json()
        assert answer["model"] == answers, answer


@pytest.mark.parametrize(("path", "prompt"), PROMPTED)
def test_lora_adapter_and_another_model_are_refused(served: TestClient, path: str, prompt: dict[str, Any]) -> None:
    for model in ("policy@3", "poet"):
        answer = served.post(path, json={"model": model, "lora_adapter": "checkpoint-2", **prompt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_adapter")
    gone = served.post(path, json={"model": "base-model", "lora_adapter": "checkpoint-500", **prompt})
    assert gone.status_code == 404


def test_of_several_policies_a_bare_checkpoint_is_none(engine: Any, tokenizer: Any) -> None:
    app = make_app(engine, tokenizer, catalog=lambda: (card("poet", 2),), policies=("poet", "coder"))
    answer = TestClient(app, base_url="http://localhost").post(
        "/v1/completions", json={"model": "base", "lora_adapter": "latest", "prompt": "a"}
    )
    assert answer.status_code == 400
    assert "one of poet, coder; name one, such as poet@12 or poet@best" in answer.json()["error"]["message"]


def test_health_says_that_the_model_is_loaded(call: Call) -> None:
    assert call("GET", "/health").json()["model_loaded"] is True


def test_metrics_are_json_where_that_is_asked_for(call: Call) -> None:
    call("POST", "/v1/completions", json={"model": "policy", "prompt": "hello", "max_tokens": 3})
    found = call("GET", "/metrics", headers={"Accept": "application/json"}).json()
    numbers = ("current_policy_version", "queue_depth", "max_batch_size", "flush_interval_ms")
    assert [found[name] for name in numbers] == [3, 0, 128, 0.0]
    (tokens,) = found["metrics"]["vllm:num_requests_running"]
    assert tokens == {"labels": {"model_name": "nano", "engine": "0"}, "value": 0.0}
    assert call("GET", "/metrics", headers={"Accept": "text/html, */*"}).text.startswith("# HELP")


def test_metrics_as_json_are_those_of_prometheus(app: FastAPI) -> None:
    call = partial(send_to, app)
    text = call("GET", "/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    found = call("GET", "/v1/metrics").json()["metrics"]
    assert {name for name in found if not name.startswith("http_")} == names
    assert found["parallm:training_metric"] == [{"labels": {"policy": "policy", "metric": "loss"}, "value": None}]


def test_models_and_the_queue_have_shorter_and_longer_names(call: Call) -> None:
    for path, same in (("/models", "/v1/models"), ("/v1/queue/stats", "/v1/queue")):
        assert call("GET", path).json() == call("GET", same).json()
