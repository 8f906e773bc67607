"""Ollama's options: each is honoured, without effect, or refused by name."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from parallm.errors import InvalidRequest
from parallm.server.keep_alive import keep_alive_of, read_keep_alive
from parallm.server.ollama.options import NEUTRAL, OllamaOptions, read_options, sampling_fields
from tests.server.conftest import CharacterTokenizer, EchoEngine, application, send_to

Call = Callable[..., httpx.Response]
OF_LLAMA_CPP = {
    "draft_num_predict": 1,
    "f16_kv": True,
    "low_vram": True,
    "main_gpu": 1,
    "num_batch": 1,
    "num_gpu": -1,
    "num_gqa": 1,
    "num_keep": 4,
    "num_thread": 8,
    "numa": True,
    "use_mlock": True,
    "use_mmap": False,
    "vocab_only": True,
}


@pytest.fixture(scope="module")
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def call(engine: EchoEngine) -> Call:
    return partial(send_to, application(engine, CharacterTokenizer()))


def sampling(call: Call, engine: EchoEngine, **options: Any) -> Any:
    body = {"model": "policy", "prompt": "hello", "raw": True, "options": options}
    response = call("POST", "/api/generate", json=body)
    assert response.status_code == 200, response.text
    return engine.requests[-1].sampling


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({}, "temperature", 0.8),
        ({}, "top_k", 40),
        ({}, "top_p", 0.9),
        ({}, "min_p", 0.0),
        ({}, "seed", None),
        ({}, "repetition_penalty", 1.0),
        ({}, "max_tokens", 195),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": None}, "temperature", 0.8),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 1}, "top_p", 1),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 0}, "seed", 0),
        ({"seed": -1}, "seed", None),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": "a"}, "stop", ("a",)),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, "repetition_penalty", 1.1),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": -0.5, "penalize_newline": True}, "frequency_penalty", -0.5),
        ({"num_predict": 3}, "max_tokens", 3),
        ({"num_predict": 9999}, "max_tokens", 195),
        ({"num_ctx": 50}, "max_tokens", 45),
        ({"num_ctx": 50, "num_predict": 3}, "max_tokens", 3),
        ({"num_ctx": 999_999}, "max_tokens", 195),
    ],
)
def test_options_that_are_honoured(
    call: Call, engine: EchoEngine, options: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(sampling(call, engine, **options), field) == value


def test_options_of_llama_cpp_have_no_effect(call: Call, engine: EchoEngine) -> None:
    assert sampling(call, engine, **OF_LLAMA_CPP) == sampling(call, engine)


def test_values_that_ask_for_nothing_have_no_effect(call: Call, engine: EchoEngine) -> None:
    neutral = {name: value for name, (value,) in NEUTRAL.items()}
    others = {"mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": 64, "penalize_newline": False}
    assert sampling(call, engine, **neutral, **others) == sampling(call, engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"tfs_z": 0.5}, "tfs_z is not supported"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": 3}, "temperature should be less than or equal to 2"),
        ({"temperature": "hot"}, "temperature"),
        ({"num_predict": -2}, "num_predict should be"),
        ({"num_predict": 0}, "num_predict is 0"),
        ({"num_gpu": "all"}, "num_gpu should be a valid integer"),
        ({"seed": -7}, "seed should be"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is 64"),
        ({"presence_penalty": 1, "penalize_newline": False}, "penalize_newline is false"),
    ],
)
def test_options_that_are_refused(call: Call, options: dict[str, Any], message: str) -> None:
    for path, fields in (
        ("/api/generate", {"prompt": "hello"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        response = call("POST", path, json={"model": "policy", "options": options} | fields)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]


def test_the_server_wins_over_ollama_and_the_request_over_both() -> None:
    defaults = {"temperature": 0.6, "repetition_penalty": 1.05}
    assert sampling_fields(read_options({}), defaults) == {
        "temperature": 0.6,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "stop": [],
    }
    asked = sampling_fields(read_options({"temperature": 0, "repeat_penalty": 1.2}), defaults)
    assert (asked["temperature"], asked["repetition_penalty"]) == (0, 1.2)


def test_every_option_of_ollamas_client_is_known() -> None:
    """These are the fields of `ollama.Options` 0.6.3 and of Ollama's own api.Options."""
    names = """numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock
        embedding_only num_thread num_keep seed num_predict top_k top_p tfs_z typical_p repeat_last_n temperature
        repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop
        min_p draft_num_predict"""
    assert set(names.split()) <= OllamaOptions.model_fields.keys() | NEUTRAL.keys()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((300, 300), (1.5, 1.5), (0, 0), (-1, -1), ("5m", 300), ("1h30m", 5400), ("-1m", -60), ("10", 10)),
        *(("1.5s", 1.5), ("500ms", 0.5), ("0s", 0), ("-1", -1)),
    ],
)
def test_times_to_stay_loaded_are_numbers_and_durations_of_go(text: object, seconds: float) -> None:
    assert read_keep_alive(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "m", "5 minutes", "5x", True, [5], "1h-5m", 10**400, "9" * 400, math.inf, math.nan, "9" * 400 + "s"]
)
def test_what_is_no_time_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="seconds"):
        read_keep_alive(text)
    assert keep_alive_of({"keep_alive": text}) is None


def test_a_body_without_a_time_asks_for_none() -> None:
    assert (keep_alive_of({}), keep_alive_of({"keep_alive": None}), keep_alive_of({"keep_alive": "0m"})) == (
        None,
        None,
        0,
    )


def test_errors_name_the_option() -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_options({"top_p": 7})
    assert raised.value.parameter == "options.top_p"
