"""What an environment says between two turns becomes tokens, and what the model has said stays as it was sampled."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from parallm.errors import InvalidRequest
from parallm.model.chat.tokenizer import ChatTokenizer, reply_tokens
from parallm.model.load import NANO
from parallm.types import Message

QUESTION = Message(role="user", content="What is 3 * 4?")
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


@pytest.fixture
def with_template(tokenizer: ChatTokenizer) -> Callable[[str | None], ChatTokenizer]:
    def make(template: str | None) -> ChatTokenizer:
        tokenizer._tokenizer.chat_template = template
        tokenizer.has_chat_template = template is not None
        return tokenizer

    return make


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_the_tokens_of_a_turn_are_those_of_the_whole_conversation(with_template: Callable[..., ChatTokenizer]) -> None:
    tokenizer = with_template(CHATML)
    prompt = tokenizer.encode_chat([QUESTION])
    sampled = (*tokenizer.encode_more("3 * 4 = 12"), 1)  # the end token was sampled too
    answer = Message(role="tool", content="12 apples")
    tokens = reply_tokens(tokenizer, [QUESTION, said("3 * 4 = 12")], sampled, [answer])
    assert (*prompt, *sampled, *tokens) == tokenizer.encode_chat([QUESTION, said("3 * 4 = 12"), answer])


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(with_template: Callable[..., ChatTokenizer]) -> None:
    tokenizer = with_template(CHATML)
    sampled = tokenizer.encode_more("3 * 4")
    tokens = reply_tokens(tokenizer, [QUESTION, said("3 * 4")], sampled, [Message(role="user", content="12")])
    whole = [QUESTION, said("3 * 4"), Message(role="user", content="12")]
    assert (*tokenizer.encode_chat([QUESTION]), *sampled, *tokens) == tokenizer.encode_chat(whole)


def test_what_was_sampled_is_kept_where_the_template_would_write_it_otherwise(
    with_template: Callable[..., ChatTokenizer],
) -> None:
    tokenizer = with_template(CHATML)  # which cuts spaces at both ends
    sampled = tokenizer.encode_more("  12 ")
    tokens = reply_tokens(tokenizer, [QUESTION, said("  12 ")], sampled, [Message(role="user", content="Why?")])
    text = tokenizer._tokenizer.decode([*sampled, *tokens])
    assert text == "  12 <|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n"


def test_a_third_turn_follows_a_conversation_of_any_form(tokenizer: ChatTokenizer) -> None:
    before = [QUESTION, said("3 * 4 = "), said("12"), Message(role="user", content="and 5?"), said("17")]
    tokens = reply_tokens(tokenizer, before, (1,), [Message(role="user", content="Good.")])
    assert tokenizer._tokenizer.decode(tokens) == "<|user|>Good.<|assistant|>"


def test_without_a_template_messages_stand_on_lines_of_their_own(with_template: Callable[..., ChatTokenizer]) -> None:
    tokenizer = with_template(None)
    tokens = reply_tokens(tokenizer, [QUESTION, said("12")], (), [Message(role="user", content="Why?")])
    assert tokenizer.decode(tokens) == "\nWhy?\n"


def test_a_reply_of_the_assistant_goes_on_in_its_text(tokenizer: ChatTokenizer) -> None:
    sampled = tokenizer.encode_more("3 * 4 = ")
    tokens = reply_tokens(tokenizer, [QUESTION, said("3 * 4 = ")], sampled, [said("12")])
    assert tokens == tokenizer.encode_more("12")
    assert reply_tokens(tokenizer, [QUESTION, said("3 * 4 = ")], sampled, [said("")]) == ()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",  # no turn of the assistant
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",  # no message of a tool
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",  # everything twice
    ],
)
def test_a_template_that_does_not_allow_a_turn_is_refused(
    with_template: Callable[..., ChatTokenizer], template: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"leaves out .* of the roles \['tool'\]"):
        reply_tokens(with_template(template), [QUESTION, said("x")], (), [Message(role="tool", content="12")])


def test_what_a_template_says_against_a_role_is_passed_on(with_template: Callable[..., ChatTokenizer]) -> None:
    tokenizer = with_template("{{ raise_exception('only users here') }}")
    with pytest.raises(InvalidRequest, match="only users here"):
        reply_tokens(tokenizer, [QUESTION, said("x")], (), [Message(role="tool", content="12")])


def test_a_tokenizer_that_puts_a_space_before_a_text_still_writes_on_exactly(tokenizer: ChatTokenizer) -> None:
    spacing = copy.copy(tokenizer)
    encode = tokenizer._tokenizer.encode

    class Spacing:
        """Like tokenizers that begin every text with a space, but not what follows the end of a line."""

        def encode(self, text: str, **options: Any) -> list[int]:
            return list(encode(text if not text or text.startswith("\n") else " " + text, **options))

        def decode(self, tokens: list[int], **options: Any) -> str:
            return str(tokenizer._tokenizer.decode(tokens, **options))

    spacing._tokenizer = Spacing()
    sampled = tokenizer.encode_more("3 * 4 = ")
    tokens = reply_tokens(spacing, [QUESTION, said("3 * 4 = ")], sampled, [said("12")])
    assert tokenizer.decode([*sampled, *tokens]) == "3 * 4 = 12"


def test_text_that_cannot_be_written_behind_the_turn_is_refused(tokenizer: ChatTokenizer) -> None:
    class Mute:
        def encode(self, text: str, **options: Any) -> list[int]:
            return []

        def decode(self, tokens: list[int], **options: Any) -> str:
            return ""

    tokenizer._tokenizer = tokenizer._backend = Mute()
    with pytest.raises(InvalidRequest, match="cannot write '12' after"):
        reply_tokens(tokenizer, [QUESTION, said("x")], (3,), [said("12")])
