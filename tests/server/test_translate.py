from types import SimpleNamespace
from typing import Any

import pytest

from parallm.errors import ContextTooLong, InvalidRequest
from parallm.server.catalog import resolved, resolved_to
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_schemas import CompletionBody
from parallm.server.openai.translate import chat_request, completion_requests
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard, SamplingParams

SETTINGS = ServerSettings(default_max_tokens=50)


def test_every_sampling_parameter_reaches_the_engine(tokenizer: Any) -> None:
    body = CompletionBody.model_validate(
        {
            "model": "best",
            "prompt": "ab",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "seed": 3,
            "stop": "x",
            "stop_token_ids": [5],
            "ignore_eos": True,
            "logprobs": 2,
            "n": 4,
            "best_of": 4,
            "presence_penalty": -1,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1, "700": -100},
            "min_tokens": 2,
            "prompt_logprobs": 1,
        }
    )
    (request,) = completion_requests(body, "cmpl-1", service_of(tokenizer, SETTINGS, 100))
    assert (request.model, request.n, request.prompt_tokens, request.traffic) == ("best", 4, (97, 98), "serving")
    assert request.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        stop=("x",),
        stop_token_ids=(5,),
        ignore_eos=True,
        top_logprobs=2,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((5, 1.0), (700, -100.0)),
        min_tokens=2,
        prompt_logprobs=1,
    )


def test_echoed_log_probs_are_asked_of_the_engine_as_far_as_either_field_wants_them(tokenizer: Any) -> None:
    for fields, asked in (
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 4}, 4),
        ({"logprobs": 3, "prompt_logprobs": 0}, 0),
    ):
        body = CompletionBody.model_validate({"model": "policy", "prompt": "ab", "max_tokens": 1} | fields)
        (request,) = completion_requests(body, "1", service_of(tokenizer, SETTINGS, 100))
        assert request.sampling.prompt_logprobs == asked
        assert (request.sampling.prompt_logprobs is None) == (asked is None)


@pytest.mark.parametrize(("max_context", "max_tokens"), [(100, 50), (40, 38), (3, 1)])
def test_without_max_tokens_the_default_or_the_rest_of_the_context_is_taken(
    tokenizer: Any, max_context: int, max_tokens: int
) -> None:
    body = CompletionBody.model_validate({"model": "policy", "prompt": "ab"})
    (request,) = completion_requests(body, "1", service_of(tokenizer, SETTINGS, max_context))
    assert request.sampling.max_tokens == max_tokens


def test_a_prompt_that_fills_the_context_is_named_and_not_its_max_tokens(tokenizer: Any) -> None:
    body = CompletionBody.model_validate({"model": "policy", "prompt": "ab"})
    with pytest.raises(ContextTooLong, match="prompt has 2 tokens and this model's maximum context length is 2"):
        completion_requests(body, "1", service_of(tokenizer, SETTINGS, 2))


def test_minus_one_for_top_k_is_off(tokenizer: Any) -> None:
    body = ChatBody.model_validate({"model": "policy", "messages": [{"role": "user", "content": "a"}], "top_k": -1})
    request, _ = chat_request(body, "1", service_of(tokenizer, SETTINGS, 100))
    assert request.sampling.top_k == 0


def test_a_limit_is_named_with_its_value_and_the_way_out(tokenizer: Any) -> None:
    body = CompletionBody.model_validate({"model": "policy", "prompt": "ab", "n": 65})
    with pytest.raises(InvalidRequest, match=r"n is 65, the limit is 64; raise server.max_n"):
        completion_requests(body, "1", service_of(tokenizer, SETTINGS, 100))


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"prompt_logprobs": 100}, "prompt_logprobs is 100, the limit is 20; raise server.max_top_logprobs"),
        ({"logprobs": 21}, "logprobs is 21, the limit is 20; raise server.max_top_logprobs"),
        ({"stop": ["a"] * 17}, "stop has 17 items, the limit is 16; raise server.max_stop"),
    ],
)
def test_limits_name_the_setting_that_raises_them(tokenizer: Any, fields: dict[str, Any], setting: str) -> None:
    body = CompletionBody.model_validate({"model": "policy", "prompt": "ab"} | fields)
    with pytest.raises(InvalidRequest, match=setting):
        completion_requests(body, "1", service_of(tokenizer, SETTINGS, 100))


def service_of(tokenizer: Any, settings: ServerSettings, max_context: int) -> Service:
    service: Any = SimpleNamespace(
        tokenizer=tokenizer, settings=settings, engine=SimpleNamespace(max_context=max_context)
    )
    return service


def card(name: str, version: int, *aliases: str) -> AdapterCard:
    return AdapterCard(
        name=name,
        version=version,
        parent=None,
        step=0,
        rank=8,
        alpha=8.0,
        aliases=aliases,
        digest="",
        num_running=0,
        is_served="best" not in aliases,
    )


def test_names_resolve_to_versions() -> None:
    cards = (card("policy", 3, "latest"), card("policy", 2, "best"), card("other", 5))
    names = ["base", "policy", "latest", "best", "policy@2", "other", "unknown"]
    expected = ["base", "policy@3", "policy@3", "policy@2", "policy@2", "other@5", "unknown"]
    assert [resolved(name, cards, ("policy",)) for name in names] == expected
    assert resolved("policy", (), ("policy",)) == "policy@0"


def test_an_answer_names_the_version_that_made_it_and_not_the_newest() -> None:
    cards = (card("policy", 4, "latest"), card("policy", 2, "best"), card("other", 5))
    assert resolved_to("policy", 3, cards) == "policy@3"
    assert resolved_to("best", 2, cards) == "policy@2"
    assert resolved_to("other", 5, cards) == "other@5"
    assert resolved_to("policy@02", 2, cards) == "policy@2"
    assert resolved_to("policy", 0, ()) == "policy@0"
    assert resolved_to("base", 0, cards) == "base"


def test_adapters_of_several_names_are_told_apart() -> None:
    cards = (card("poet", 2), card("poet", 1, "poet@best"), card("policy", 2, "latest", "best"), card("policy", 1))
    names = ["poet", "poet@latest", "poet@1", "poet@best", "best", "policy@best", "latest"]
    expected = ["poet@2", "poet@2", "poet@1", "poet@1", "policy@2", "policy@2", "policy@2"]
    assert [resolved(name, cards, ("poet", "policy")) for name in names] == expected
    assert [resolved(name, (), ("poet",)) for name in ("poet", "poet@latest", "policy")] == [
        "poet@0",
        "poet@0",
        "policy",
    ]
    assert [resolved_to(name, int(end[-1]), cards) for name, end in zip(names, expected, strict=True)] == expected
    assert resolved_to("poet", 1, cards) == "poet@1"
    assert resolved_to("coder", 0, cards) == "coder@0"
    assert resolved_to("latest", 0, ()) == "policy@0"


@pytest.mark.parametrize("server_parses", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_control_tokens_in_raw_prompts_are_tokens_unless_it_is_asked_not_to(
    server_parses: bool, asked: bool | None, hermes: Any
) -> None:
    fields = {"model": "policy", "prompt": f"{hermes.token_text(3)}hi"}
    body = CompletionBody.model_validate(fields | ({} if asked is None else {"parse_special": asked}))
    settings = ServerSettings(parse_special=server_parses)
    (request,) = completion_requests(body, "r", service_of(hermes, settings, 2000))
    assert (3 in request.prompt_tokens) == (server_parses if asked is None else asked)
    assert hermes.decode(request.prompt_tokens, special=True) == fields["prompt"]
