from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
Read = Callable[[httpx.Response], list[Any]]


def test_a_completion_has_text_usage_and_the_version_that_made_it(complete: Call) -> None:
    response = complete()
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "text_completion"
    assert answer["model"] == "policy@3"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "policy_version": 3,
            "weight_versions": [{"version": "3", "start": 0, "end": 8}],
            "text": "hello 0",
            "logprobs": None,
        }
    ]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["a 0", "a 1"]),
        ([97, 98], ["ab 0", "ab 1"]),
        (["a", "b"], ["a 0", "a 1", "b 0", "b 1"]),
        ([[97], [98]], ["a 0", "a 1", "b 0", "b 1"]),
    ],
)
def test_every_form_of_a_prompt_gives_n_choices_for_each(complete: Call, prompt: object, texts: list[str]) -> None:
    answer = complete(prompt=prompt, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


@pytest.mark.parametrize(
    ("model", "resolved"),
    [("base", "base"), ("policy", "policy@3"), ("policy@2", "policy@2"), ("best", "policy@2")],
)
def test_a_name_is_answered_with_what_it_stands_for(complete: Call, chunks_of: Read, model: str, resolved: str) -> None:
    assert complete(model=model).json()["model"] == resolved
    assert {chunk["model"] for chunk in chunks_of(complete(model=model, stream=True))} == {resolved}


def test_logprobs_hold_the_sampled_token_beside_the_likeliest(complete: Call) -> None:
    logprobs = complete(prompt="hi", logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "i"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"x": -0.5, "h": -0.25}, {"x": -0.5, "i": -0.25}],
        "text_offset": [0, 1],
    }


def test_a_stream_says_the_same_as_the_whole_answer(complete: Call, chunks_of: Read) -> None:
    fields = {"prompt": ["hello", "you"], "n": 2, "logprobs": 2, "return_token_ids": True}
    whole = complete(**fields).json()
    chunks = chunks_of(complete(**fields, stream=True))
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert prompts == [choice["prompt_token_ids"]]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for entry in logprobs for item in entry[name]] == choice["logprobs"][name]


def test_the_last_chunk_has_the_usage_where_it_is_asked_for(complete: Call, chunks_of: Read) -> None:
    chunks = chunks_of(complete(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 8
    assert all("usage" not in chunk for chunk in chunks_of(complete(stream=True)))


def test_every_chunk_has_the_usage_until_then_where_it_is_asked_for(complete: Call, chunks_of: Read) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(complete(stream=True, stream_options=options))
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (1, 8)
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    alone = complete(stream=True, stream_options={"continuous_usage_stats": True})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "stream_options")


def test_a_stop_string_ends_the_text_before_it(complete: Call, chunks_of: Read) -> None:
    whole = complete(stop="lo").json()["choices"][0]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks_of(complete(stop=["lo"], stream=True)))
    assert (whole["text"], whole["finish_reason"], streamed) == ("hel", "stop", "hel")


def test_max_tokens_ends_with_length(complete: Call) -> None:
    choice = complete(max_tokens=3).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hel", "length")
