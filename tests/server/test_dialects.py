import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from parallm.errors import EngineFull
from parallm.server.dialects.routes_generate import dialect_of

Call = Callable[..., httpx.Response]
HELLO = [104, 101, 108, 108, 111]
SPAN = [{"version": "3", "start": 0, "end": 8}]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompts": ["a"]}, "trl"),
        ({"input_ids": [1]}, "sglang"),
        ({"text": "a"}, "sglang"),
        ({"sampling_params": {}}, "sglang"),
        ({"prompt": {"prompt_token_ids": [1]}}, "vllm legacy"),
        ({"prompt": "a"}, "native"),
        ({"prompt": [1]}, "native"),
        ({}, "native"),
    ],
)
def test_the_keys_of_a_body_tell_its_dialect(body: dict[str, Any], name: str) -> None:
    assert dialect_of(body).name == name


def test_native_answers_are_columns_with_versions_and_the_clients_own_ids(call: Call) -> None:
    body = {"prompt": ["hello", [104, 105]], "n": 2, "max_tokens": 3, "request_id": "r1", "step_id": 7}
    answer = call("POST", "/generate", json=body).json()
    assert (answer["request_id"], answer["step_id"], answer["model"]) == ("r1", 7, "policy@3")
    assert answer["text"] == ["hel", "hel", "hi ", "hi "]
    assert answer["prompt_index"] == [0, 0, 1, 1]
    assert answer["logprobs"] == [[-0.25] * 3] * 4
    assert answer["logprobs_mode"] == "temperature"
    assert answer["policy_versions"] == [3, 3, 3, 3]
    assert answer["weight_versions"] == [[{"version": "3", "start": 0, "end": 3}]] * 4
    assert answer["prompt_token_ids"] == [HELLO, [104, 105]]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 12,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_atropos_gets_one_object_in_a_list_for_each_token_the_sampled_one_first(call: Call) -> None:
    body = {"prompt": {"prompt_token_ids": HELLO}, "logprobs": 2, "n": 2, "max_tokens": 256, "temperature": 1.0}
    refused = call("POST", "/generate", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == 400
    answer = call("POST", "/generate", json=body | {"max_tokens": 100}).json()
    assert answer["logprobs"][0][0] == [{"104": -0.25, "120": -0.5, "121": -1.5}]
    assert next(iter(answer["logprobs"][0][0][0])) == "104"
    assert answer["finish_reasons"] == ["stop", "stop"]
    assert answer["token_ids"][1] == [*HELLO, 32, 49, 0]
    assert (answer["prompt"], answer["prompt_token_ids"]) == ("hello", HELLO)
    assert answer["weight_versions"][0] == SPAN


def test_atropos_without_logprobs_and_without_max_tokens_gets_vllms_sixteen_tokens(call: Call) -> None:
    body = {"prompt": {"prompt_token_ids": [97] * 30}, "timeout": 20}
    answer = call("POST", "http://localhost//generate", json=body).json()
    assert answer["logprobs"] is None
    assert (len(answer["token_ids"][0]), answer["finish_reasons"]) == (16, ["length"])


def test_atropos_gets_log_probs_of_the_prompt_the_prompts_own_token_first(call: Call) -> None:
    body = {"prompt": {"prompt_token_ids": HELLO}, "prompt_logprobs": 1, "n": 1, "temperature": 0.0, "max_tokens": 1}
    first, second, *_ = call("POST", "/generate", json=body).json()["prompt_logprobs"]
    assert first is None
    assert next(iter(second)) == "101"
    assert len(second) == 2


def test_the_prompts_log_probs_are_in_the_forms_of_sglang_and_of_token_in_token_out(call: Call) -> None:
    body = {
        "input_ids": HELLO,
        "return_logprob": True,
        "logprob_start_len": 3,
        "sampling_params": {"max_new_tokens": 1},
    }
    logprobs = call("POST", "/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    assert [(token, text) for _, token, text in logprobs] == [(108, None), (111, None)]
    assert all(logprob < 0 for logprob, _, _ in logprobs)
    whole = call("POST", "/generate", json=body | {"logprob_start_len": 0}).json()["meta_info"]["input_token_logprobs"]
    assert whole[0] == [None, 104, None]
    likeliest = call("POST", "/generate", json=body | {"top_logprobs_num": 1}).json()["meta_info"]
    assert likeliest["input_top_logprobs"] == [[[-0.5, 120, None]]] * 2
    assert likeliest["output_top_logprobs"] == [[[-0.5, 120, None]]]
    params = {"prompt_logprobs": 1, "max_tokens": 1}
    tokens = {"model": "policy", "token_ids": HELLO, "sampling_params": params}
    first, second, *_ = call("POST", "/inference/v1/generate", json=tokens).json()["prompt_logprobs"]
    assert first is None
    assert set(second["101"]) == {"logprob", "rank", "decoded_token"}


def test_a_request_that_gives_itself_too_little_time_fails_and_is_aborted(call: Call, engine: Any) -> None:
    engine.is_endless = True
    body = {"prompt": {"prompt_token_ids": HELLO}, "timeout": 0.05}
    assert call("POST", "/generate", json=body).status_code == 504
    assert engine.num_aborted == 1


def test_trl_gets_ids_and_log_probs_by_completion_likeliest_first(call: Call) -> None:
    body = {"prompts": ["hello", "hi"], "n": 2, "max_tokens": 2, "top_k": -1, "generation_kwargs": {"seed": 3}}
    answer = call("POST", "/generate/", json=body).json()
    assert answer["prompt_ids"] == [HELLO, [104, 105]]
    assert answer["completion_ids"] == [[104, 101]] * 2 + [[104, 105]] * 2
    assert answer["logprobs"] == [[[-0.25], [-0.25]]] * 4
    assert answer["logprob_token_ids"][3] == [[104], [105]]
    tops = call("POST", "/generate/", json=body | {"logprobs": 1}).json()
    assert (tops["logprobs"][0][0], tops["logprob_token_ids"][0][0]) == ([-0.25, -0.5], [104, 120])
    assert call("POST", "/generate/", json=body | {"logprobs": None}).json()["logprobs"] is None


def test_sglang_gets_an_object_for_one_prompt_with_its_own_words(call: Call) -> None:
    body = {
        "rid": "r1",
        "input_ids": HELLO,
        "sampling_params": {"max_new_tokens": 4, "top_k": -1},
        "return_logprob": True,
    }
    answer = call("POST", "/generate", json=body).json()
    meta = answer.pop("meta_info")
    assert answer == {"text": "hell", "output_ids": [104, 101, 108, 108], "index": 0}
    assert meta["id"] == "r1"
    assert meta["finish_reason"]["type"] == "length"
    assert meta["finish_reason"]["length"] == 4
    assert meta["output_token_logprobs"][0] == [-0.25, 104, None]
    assert (meta["weight_version"], meta["weight_versions"]) == ("3", [{"version": "3", "start": 0, "end": 4}])


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({}, "hello 0", 0),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "hello 0<end>", 0),
        ({"skip_special_tokens": False}, "hello 0", 0),
        ({"stop_token_ids": [0]}, "hello 0", 0),
    ],
)
def test_sglang_says_what_has_stopped_it_and_shows_it_if_asked(
    call: Call, params: dict[str, Any], text: str, matched: int
) -> None:
    answer = call("POST", "/generate", json={"text": "hello", "sampling_params": params}).json()
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"]["matched"] == matched


def test_sglang_gets_a_list_for_several_prompts_or_completions(call: Call) -> None:
    both = call("POST", "/generate", json={"text": ["hello", "hi"], "sampling_params": {"n": 2}}).json()
    assert [one["text"] for one in both] == ["hello 0", "hello 1", "hi 0", "hi 1"]
    assert len(call("POST", "/generate", json={"text": "hello", "sampling_params": {"n": 2}}).json()) == 2
    assert len(call("POST", "/generate", json={"input_ids": [HELLO]}).json()) == 1


def test_chunks_of_sglang_are_cumulative(call: Call, chunks_of: Callable[[httpx.Response], list[Any]]) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 3}, "stream": True, "return_logprob": True}
    chunks = chunks_of(call("POST", "/generate", json=body))
    assert [chunk["text"] for chunk in chunks] == ["h", "hi", "hi "]
    assert [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks] == [1, 2, 3]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, False]


def test_lora_path_names_the_adapter(call: Call, engine: Any) -> None:
    call("POST", "/generate", json={"text": "hello", "lora_path": "policy@2"})
    assert engine.requests[0].model == "policy@2"


def test_token_in_token_out_has_both_names_of_a_token(call: Call, engine: Any) -> None:
    params = {
        "max_tokens": 2,
        "n": 2,
        "logprobs": 1,
        "top_k": -1,
        "skip_special_tokens": False,
        "prompt_logprobs": None,
    }
    body = {"model": "policy", "token_ids": HELLO, "sampling_params": params, "cache_salt": "12", "request_id": "r1"}
    answer = call("POST", "/inference/v1/generate", json=body).json()
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("r1", HELLO)
    assert engine.requests[0].cache_salt == "12"
    assert [choice["token_ids"] for choice in answer["choices"]] == [[104, 101]] * 2
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["token_id"], one["logprob"]) for one in content] == [
        ("token_id:104", 104, -0.25),
        ("token_id:101", 101, -0.25),
    ]
    assert content[0]["top_logprobs"][0] | {"rank": 1} == content[0]["top_logprobs"][0]
    assert answer["choices"][1]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]


REFUSED: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    ("/generate", {"prompts": ["a"], "images": [1]}, lambda answer: answer["detail"]),
    ("/generate", {"prompts": []}, lambda answer: answer["detail"]),
    (
        "/generate",
        {"text": "a", "logprob_start_len": 0, "return_logprob": False},
        lambda answer: answer["error"]["message"],
    ),
    ("/generate", {"text": "a", "input_ids": [1]}, lambda answer: answer["error"]["message"]),
    ("/generate", {"text": "a", "sampling_params": {"ebnf": "a"}}, lambda answer: answer["error"]["message"]),
    ("/generate", {"input_ids": [1.5]}, lambda answer: answer["error"]["message"]),
    ("/generate", {"prompt": {"prompt_token_ids": ["a"]}}, lambda answer: answer["error"]["message"]),
    ("/generate", {"prompts": ["a"], "prompt_logprobs": 1}, lambda answer: answer["detail"]),
    ("/generate", {"prompt": "a", "echo": True}, lambda answer: answer["error"]["message"]),
    ("/generate", {"prompt": "a", "prompt_logprobs": 0}, lambda answer: answer["error"]["message"]),
    ("/generate", {"prompt": "a", "stream": True}, lambda answer: answer["error"]["message"]),
    ("/generate", {"prompt": "a", "split": "train"}, lambda answer: answer["error"]["message"]),
    ("/inference/v1/generate", {"model": "policy", "token_ids": []}, lambda answer: answer["error"]["message"]),
    ("/inference/v1/generate", {"model": "policy", "token_ids": [1], "stream": True}, lambda a: a["error"]["message"]),
    ("/tokenize", {}, lambda answer: answer["error"]["message"]),
    ("/detokenize", {"tokens": ["a"]}, lambda answer: answer["error"]["message"]),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_what_is_not_supported_is_refused_in_the_dialects_own_form(
    call: Call, path: str, body: dict[str, Any], message: Callable[[Any], str]
) -> None:
    response = call("POST", path, json=body)
    assert response.status_code == 400
    assert message(response.json())


def test_errors_of_the_engine_keep_their_status_and_headers(call: Call, engine: Any) -> None:
    engine.refusal = EngineFull("the queue is full")
    response = call("POST", "/generate", json={"prompts": ["a"]})
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert response.json() == {"detail": "the queue is full"}


def test_tokens_are_called_by_their_numbers_where_that_is_asked_for(complete: Call, chat: Call) -> None:
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    logprobs = complete(logprobs=1, **asked).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:104", "token_id:101"]
    assert logprobs["top_logprobs"][0] == {"token_id:120": -0.5, "token_id:104": -0.25}
    (first, _) = chat(logprobs=True, **asked).json()["choices"][0]["logprobs"]["content"]
    assert first["token"].startswith("token_id:")


def test_text_becomes_tokens_and_tokens_text(call: Call) -> None:
    answer = call("POST", "/tokenize", json={"model": "policy", "prompt": "hi", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 200, "tokens": [104, 105], "token_strs": ["h", "i"]}
    chat = call("POST", "/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == len("<user>hi")
    assert call("POST", "/detokenize", json={"tokens": [104, 0]}).json() == {"prompt": "h<end>"}


def test_openai_answers_give_the_clients_ids_back_and_say_which_log_probs_they_have(
    complete: Call, chat: Call, chunks_of: Callable[[httpx.Response], list[Any]]
) -> None:
    asked = {"request_id": "r1", "step_id": "s9"}
    for answer in (complete(logprobs=0, **asked).json(), chat(logprobs=True, **asked).json()):
        assert (answer["request_id"], answer["step_id"], answer["logprobs_mode"]) == ("r1", "s9", "temperature")
        assert answer["id"].endswith("cmpl-r1")
    assert {chunk["step_id"] for chunk in chunks_of(chat(stream=True, **asked))} == {"s9"}
    assert "logprobs_mode" not in json.dumps(complete().json())


def test_control_tokens_are_tokenized_in_texts_alone_and_there_unless_it_is_asked_not_to(
    call_hermes: Call, hermes: Any
) -> None:
    text = f"{hermes.token_text(3)}hi"

    def tokens(**fields: Any) -> list[int]:
        found: list[int] = call_hermes("POST", "/tokenize", json=fields).json()["tokens"]
        return found

    assert tokens(prompt=text) == tokens(prompt=text, parse_special=True) == list(hermes.encode(text))
    assert tokens(prompt=text, parse_special=False) == list(hermes.encode(text, parse_special=False))
    contents = ("hi", text)
    counts = [tokens(messages=[{"role": "user", "content": content}]).count(3) for content in contents]
    assert counts[0] == counts[1]


def test_a_chat_is_tokenized_as_it_is_answered(call_hermes: Call, engine: Any) -> None:
    add = {"type": "function", "function": {"name": "add", "description": "a sum"}}
    user, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}
    for fields in (
        {"messages": [user]},
        {"messages": [user], "tools": [add]},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [user, begun], "continue_final_message": True},
        {"messages": [user, begun], "add_generation_prompt": False},
    ):
        tokens = call_hermes("POST", "/tokenize", json=fields).json()["tokens"]
        assert call_hermes("POST", "/v1/chat/completions", json={"model": "policy"} | fields).status_code == 200
        assert tokens == list(engine.requests[-1].prompt_tokens)


def test_an_abort_is_an_error_to_atropos_and_no_failure_of_the_server(call: Call, engine: Any) -> None:
    engine.is_endless = True
    engine.cancelled.add("mine#0")
    body = {"prompt": {"prompt_token_ids": [104, 105]}, "max_tokens": 4, "request_id": "mine"}
    answer = call("POST", "/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "ConflictError")
