"""Requests of the first users' programs, sent as these programs send them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

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


def test_metrics_as_json_are_those_of_prometheus(call: Call) -> None:
    text = call("GET", "/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    found = call("GET", "/v1/metrics").json()["metrics"]
    assert {name for name in found if not name.startswith("http_")} == names
    assert found["parallm:training_metric"] == [{"labels": {"policy": "policy", "metric": "loss"}, "value": None}]


def test_models_and_the_queue_have_shorter_and_longer_names(call: Call) -> None:
    for path, same in (("/models", "/v1/models"), ("/v1/queue/stats", "/v1/queue")):
        assert call("GET", path).json() == call("GET", same).json()
