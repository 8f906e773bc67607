"""Echo and log-probs of prompts, in the forms that lm-eval, vLLM's clients and OpenAI's older ones read."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
Read = Callable[[httpx.Response], list[Any]]


def test_an_echo_with_logprobs_is_one_text_whose_first_token_has_none(complete: Call) -> None:
    choice = complete(prompt="hi", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "hih"
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "h"],
        "token_logprobs": [None, -2.0, -0.25],
        "top_logprobs": [None, {"x": -0.5, "i": -2.0}, {"x": -0.5, "h": -0.25}],
        "text_offset": [0, 1, 2],
    }
    assert "prompt_logprobs" not in choice


def test_without_tokens_to_sample_the_echo_is_the_prompt_alone(complete: Call) -> None:
    answer = complete(prompt=["hi", [98, 97, 98]], echo=True, logprobs=0, max_tokens=0).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi", "bab"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["choices"][1]["logprobs"]["top_logprobs"] == [None, {"a": -2.0}, {"b": -2.0}]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert answer["model"] == "policy@3"


def test_an_echo_without_logprobs_has_none(complete: Call) -> None:
    choice = complete(prompt="hi", echo=True, max_tokens=2).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("hihi", None)


def test_a_streamed_echo_begins_each_choice_with_its_prompt(complete: Call, chunks_of: Read) -> None:
    chunks = chunks_of(complete(prompt=["ab", "c"], n=2, echo=True, stream=True, max_tokens=2))
    for index, text in enumerate(["abab", "abab", "cc ", "cc "]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == text


def test_prompt_logprobs_name_the_token_of_the_prompt_first(complete: Call) -> None:
    choice = complete(prompt="hi", prompt_logprobs=1, max_tokens=0).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -2.0, "rank": 3, "decoded_token": "i"},
            "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        },
    ]
    assert (choice["text"], choice["logprobs"]) == ("", None)


def test_each_field_gets_as_many_alternatives_as_it_asks_for(complete: Call) -> None:
    choice = complete(prompt="hi", prompt_logprobs=2, echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert list(choice["prompt_logprobs"][1]) == ["105", "120", "121"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"i": -2.0}, {"h": -0.25}]
    choice = complete(prompt="hi", prompt_logprobs=0, echo=True, logprobs=2, max_tokens=1).json()["choices"][0]
    assert list(choice["prompt_logprobs"][1]) == ["105"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["x", "y", "i"]


def test_a_chat_has_them_beside_its_choices(chat: Call) -> None:
    told = chat(prompt_logprobs=0, max_tokens=1).json()["prompt_logprobs"]
    assert told[0] is None
    assert list(told[1]) == [str(ord("u"))]
    assert "prompt_logprobs" not in chat(max_tokens=1).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(complete: Call, fields: dict[str, Any], param: str) -> None:
    response = complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_penalties_and_bias_are_accepted(complete: Call, chat: Call) -> None:
    fields = {"presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}}
    for send in (complete, chat):
        assert send(**fields, min_tokens=3, n=2, best_of=2).status_code == 200
