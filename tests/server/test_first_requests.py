"""Requests of the first users' programs, sent as these programs send them."""

from collections.abc import Callable

import httpx

Call = Callable[..., httpx.Response]


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
