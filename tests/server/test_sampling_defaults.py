"""Sampling parameters that clients leave to the server."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from parallm.reports import TrainingStatus
from parallm.server.openai.completion_schemas import CompletionBody
from parallm.server.openai.translate import with_defaults
from parallm.types import SamplingParams
from tests.server.conftest import EchoEngine, card, make_app, send_to

DEFAULTS = {"temperature": 0.25, "top_p": 0.5, "top_k": 20.0, "min_p": 0.1, "repetition_penalty": 1.5}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
RESPONSE = {"model": "policy", "input": "hello"}
COMPLETION = {"model": "policy", "prompt": "hello"}

Call = Callable[..., httpx.Response]


@pytest.fixture
def call(engine: EchoEngine, tokenizer: Any) -> Call:
    app = make_app(
        engine,
        tokenizer,
        catalog=lambda: (card(3),),
        status=lambda: TrainingStatus(state="serving", step=0, total_steps=0, version=3, metrics={}),
        sampling_defaults=DEFAULTS,
    )
    return lambda method, path, **options: send_to(app, method, path, **options)


def sampled(sampling: SamplingParams | CompletionBody) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)],
)
def test_what_a_request_does_not_say_is_the_servers(
    call: Call, engine: EchoEngine, path: str, body: dict[str, object]
) -> None:
    assert call("POST", path, json=body).status_code == 200
    assert sampled(engine.requests[-1].sampling) == DEFAULTS
    # what it says wins, the API's own defaults, too; null says nothing
    assert call("POST", path, json=body | {"temperature": 1, "top_p": None}).status_code == 200
    assert sampled(engine.requests[-1].sampling) == DEFAULTS | {"temperature": 1.0}


def test_a_response_tells_what_it_was_sampled_with(call: Call) -> None:
    answer = call("POST", "/v1/responses", json=RESPONSE).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    answer = call("POST", "/v1/responses", json=RESPONSE | {"temperature": 1}).json()
    assert (answer["temperature"], answer["top_p"]) == (1.0, 0.5)


def test_trainers_sample_the_policy_as_it_is(call: Call, engine: EchoEngine) -> None:
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert call("POST", "/generate", json={"text": "hello"}).status_code == 200
    assert sampled(engine.requests[-1].sampling) == neutral
    assert call("POST", "/inference/v1/generate", json={"token_ids": [1, 2], "sampling_params": {}}).status_code == 200
    assert sampled(engine.requests[-1].sampling) == neutral


def test_what_is_learned_from_is_sampled_as_the_policy_is() -> None:
    body = CompletionBody(model="policy", prompt=["hello"])
    assert sampled(with_defaults(body, DEFAULTS)) == DEFAULTS
    collected = body.model_copy(update={"collect_trajectory": True})
    assert sampled(with_defaults(collected, DEFAULTS)) == sampled(body)


def test_the_defaults_are_told(call: Call) -> None:
    assert call("GET", "/model_info").json()["preferred_sampling_params"] == DEFAULTS
