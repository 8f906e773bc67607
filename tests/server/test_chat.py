from collections.abc import Callable
from typing import Any

import httpx

Call = Callable[..., httpx.Response]
Read = Callable[[httpx.Response], list[Any]]


def test_a_chat_has_a_message_usage_and_the_version_that_made_it(chat: Call) -> None:
    answer = chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "policy@3"
    assert answer["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 14,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "policy_version": 3,
            "weight_versions": [{"version": "3", "start": 0, "end": 14}],
            "message": {"role": "assistant", "content": "<user>hello 0"},
            "logprobs": None,
        }
    ]


def test_text_parts_are_joined_and_developer_is_the_system(chat: Call) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]).json()
    assert answer["choices"][0]["message"]["content"] == "<system>ab<user>c 0"


def test_an_earlier_answer_may_be_sent_back_as_it_came(chat: Call) -> None:
    message = chat().json()["choices"][0]["message"] | {"refusal": None, "tool_calls": None, "annotations": None}
    assert chat(messages=[{"role": "user", "content": "a"}, message]).status_code == 200


def test_logprobs_have_text_bytes_and_alternatives(chat: Call) -> None:
    content = chat(logprobs=True, top_logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    top = [{"token": "x", "logprob": -0.5, "bytes": [120]}]
    assert content == [{"token": "<", "logprob": -0.25, "bytes": [60], "top_logprobs": top}]


def test_a_stream_starts_with_the_role_of_each_choice(chat: Call, chunks_of: Read) -> None:
    chunks = chunks_of(chat(n=2, stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[2:])


def test_a_stream_says_the_same_as_the_whole_answer(chat: Call, chunks_of: Read) -> None:
    fields = {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = chat(**fields).json()
    chunks = chunks_of(chat(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        assert [item for part in parts if part["logprobs"] for item in part["logprobs"]["content"]] == (
            choice["logprobs"]["content"]
        )
        assert (parts[-1]["finish_reason"], parts[-1]["policy_version"], parts[-1]["delta"]) == ("stop", 3, {})


def test_either_name_of_the_token_limit_is_honoured_and_two_values_are_not(chat: Call) -> None:
    assert chat(max_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert chat(max_completion_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert chat(max_tokens=4, max_completion_tokens=5).status_code == 400
