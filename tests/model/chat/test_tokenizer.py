from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.errors import InvalidRequest
from parallm.model.chat.tokenizer import TIDIES_BYTE_PAIRS, ChatTokenizer
from parallm.model.load import NANO
from parallm.types import Message


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


def with_template(template: str | None) -> ChatTokenizer:
    wrapper = load_tokenizer(NANO)
    wrapper._tokenizer.chat_template = template
    return ChatTokenizer(wrapper)


@pytest.mark.parametrize("text", ["12 + 3 = 15", "", "naïve 東京 🙂", "  two\n\nlines "])
def test_text_survives_the_way_to_tokens_and_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_longer_than_the_tokenizer_names_costs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = load_tokenizer(NANO)
    wrapper._tokenizer.model_max_length = 8
    wrapper._tokenizer.encode("12 + 3 = 15 " * 4)
    assert "longer than the specified maximum" in caplog.text, "what transformers does"
    caplog.clear()
    wrapper._tokenizer.deprecation_warnings.clear()
    ChatTokenizer(wrapper).encode("12 + 3 = 15 " * 4)
    assert caplog.text == ""


def test_a_chat_becomes_the_template_with_the_start_of_the_answer(tokenizer: ChatTokenizer) -> None:
    tokens = tokenizer.encode_chat([Message(role="user", content="2 + 2?")])
    assert "".join(map(tokenizer.token_text, tokens)) == "<|user|>2 + 2?<|assistant|>"


def test_special_tokens_are_shown_alone_and_skipped_in_text(tokenizer: ChatTokenizer) -> None:
    (end,) = tokenizer.eos_token_ids
    assert (tokenizer.token_text(end), tokenizer.decode([end])) == ("<|end|>", "")


def test_messages_without_a_template_are_joined() -> None:
    plain = with_template(None)
    messages = [Message(role="system", content="Add."), Message(role="user", content="2 + 2?")]
    assert plain.decode(plain.encode_chat(messages)) == "Add.\n2 + 2?\n"


def test_what_a_template_refuses_is_an_invalid_request() -> None:
    strict = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match=r"refuses these messages: .*roles must alternate") as refused:
        strict.encode_chat([Message(role="user", content="hi")])
    assert refused.value.parameter == "messages"


def test_end_tokens_come_from_the_model() -> None:
    wrapper = load_tokenizer(NANO, eos_token_ids=[7])
    assert ChatTokenizer(wrapper).eos_token_ids == frozenset({1, 7})


def test_special_tokens_that_mark_reasoning_or_calls_are_part_of_the_text(tmp_path: Path) -> None:
    plain = load_tokenizer(NANO)._tokenizer
    plain.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    plain.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(load_tokenizer(tmp_path))
    (end,) = tokenizer.eos_token_ids
    tokens = [*tokenizer.encode("<think>2</think>3"), end]
    assert tokenizer.decode(tokens) == "<think>2</think>3"
    assert tokenizer.decode(tokens, special=True) == f"<think>2</think>3{tokenizer.token_text(end)}"
    assert tokenizer.decode_rows([tokens, [], [end]]) == [
        tokenizer.decode(row, special=True) for row in (tokens, [], [end])
    ]


@pytest.mark.parametrize("attribute", ["", "clean_up_tokenization_spaces", TIDIES_BYTE_PAIRS])
def test_text_is_that_of_transformers_whatever_it_tidies(attribute: str) -> None:
    wrapper = load_tokenizer(NANO)
    inner = wrapper._tokenizer
    inner.clean_up_tokenization_spaces = bool(attribute)
    setattr(inner, TIDIES_BYTE_PAIRS, attribute == TIDIES_BYTE_PAIRS)
    tokens = inner.encode("Tom 's pens , 12 of them .")
    tidied = "Tom's pens, 12 of them." if attribute == TIDIES_BYTE_PAIRS else "Tom 's pens , 12 of them ."
    tokenizer = ChatTokenizer(wrapper)
    assert [tokenizer.decode(tokens)] == tokenizer.decode_rows([tokens]) == [inner.decode(tokens)] == [tidied]


def test_a_tokenizer_that_changes_what_is_decoded_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = load_tokenizer(NANO)
    inner = wrapper._tokenizer

    class Louder(type(inner)):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    monkeypatch.setattr(inner, "__class__", Louder)
    assert ChatTokenizer(wrapper).decode(inner.encode("ab 12")) == "AB 12"


def test_a_template_is_asked_what_it_reads() -> None:
    template = "{% generation %}{{ messages }}{{ tools }}{{ bos_token }}{% endgeneration %}{{ effort }}"
    tokenizer = with_template(template)
    assert tokenizer.template_variables == {"effort"}
    assert tokenizer.template.knows_tools
    assert not with_template("{{ messages }}").template.knows_tools


def test_without_a_template_tools_and_variables_are_refused() -> None:
    turns = [{"role": "user", "content": "2 + 2?"}]
    plain = with_template(None)
    assert plain.decode(plain.encode_prompt(turns, end="unfinished").tokens) == "2 + 2?"
    with pytest.raises(InvalidRequest, match="no chat template"):
        plain.encode_prompt(turns, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequest, match="no chat template"):
        plain.encode_prompt(turns, variables={"effort": 1})


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer: ChatTokenizer) -> None:
    vocabulary = tokenizer._tokenizer.get_vocab().values()
    assert max(len(tokenizer.token_text(token)) for token in vocabulary) == tokenizer.max_token_length


def test_threads_get_the_tokens_that_one_alone_gets(tokenizer: ChatTokenizer) -> None:
    """The server encodes short texts on its event loop and long ones on threads."""
    texts = ["Tom has 12 apples", "a<|assistant|>b" * 20, "\U0001f600" * 50, " " * 300]
    chats = [[{"role": "user", "content": text}] for text in texts]
    alone = [
        (tokenizer.encode(text), tokenizer.encode_prompt(chat).tokens) for text, chat in zip(texts, chats, strict=True)
    ]

    def encode(place: int) -> bool:
        which = place % len(texts)
        return (tokenizer.encode(texts[which]), tokenizer.encode_prompt(chats[which]).tokens) == alone[which]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(encode, range(400)))
