"""Text that grows token by token."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from parallm.engine.detokenizer import SILENT_TOKENS, Detokenizer
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


def test_growing_text_waits_for_whole_characters(tokenizer: ChatTokenizer) -> None:
    growing, seen = Detokenizer(tokenizer), []
    for token in tokenizer.encode("é🙂 ok"):
        growing.add([token])
        seen.append(growing.text)
    assert seen[-1] == "é🙂 ok"
    assert all("\ufffd" not in text for text in seen)


def test_growing_text_decodes_only_what_is_new(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, lengths = ChatTokenizer.decode, list[int]()

    def counted(self: ChatTokenizer, tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(ChatTokenizer, "decode", counted)
    growing = Detokenizer(tokenizer)
    for token in tokenizer.encode("12 + 12 = 24, " * 20):
        growing.add([token])
    assert max(lengths) <= 3
    for token in (*tokenizer.eos_token_ids, 100_000) * 20:  # one is hidden, one is of no text
        growing.add([token])
    for token in tokenizer.encode("é🙂 ok"):
        growing.add([token])
    assert growing.text == "12 + 12 = 24, " * 20 + "é🙂 ok"
    assert max(lengths) <= 2 * SILENT_TOKENS + 4


@pytest.mark.parametrize("text", ["", "é", "🙂", "a"])
def test_bytes_that_make_no_character_become_text_as_they_come(
    text: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, broken = tokenizer.encode("🙂")
    decode, lengths = ChatTokenizer.decode, list[int]()

    def counted(self: ChatTokenizer, tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode(self, tokens)

    tokens = [*[broken] * 50, *tokenizer.encode(text), *[broken] * 49]
    monkeypatch.setattr(ChatTokenizer, "decode", counted)
    growing = Detokenizer(tokenizer)
    for token in tokens:
        growing.add([token])
    assert len(growing.text) > 80
    assert max(lengths) <= 2 * SILENT_TOKENS
    assert growing.final() == decode(tokenizer, tokens)


@pytest.mark.parametrize("text", ["12 + 12 = 24, é🙂 ok 東京", "naïve 👩‍👩‍👧 end\n\n  two  spaces", "🙂" * 9])
def test_text_of_several_tokens_at_once_is_that_of_one_after_the_other(text: str, tokenizer: ChatTokenizer) -> None:
    tokens = tokenizer.encode(text)
    for size in range(1, len(tokens) + 1):
        growing, single = Detokenizer(tokenizer), Detokenizer(tokenizer)
        for start in range(0, len(tokens), size):
            growing.add(tokens[start : start + size])
            for token in tokens[start : start + size]:
                single.add([token])
            assert "\ufffd" not in growing.text
            assert growing.text == single.text
        assert growing.text == text


def test_text_does_not_depend_on_how_tokens_come_together(tokenizer: ChatTokenizer) -> None:
    random = np.random.default_rng(0)
    *_, broken = tokenizer.encode("🙂")
    some = [*tokenizer.encode("é🙂 ok 東京 12 + 12"), broken, broken]
    for _ in range(200):
        tokens, grouped, single = random.choice(some, 60).tolist(), Detokenizer(tokenizer), Detokenizer(tokenizer)
        ends = [0, *sorted(random.choice(60, 8).tolist()), 60]
        for start, end in pairwise(ends):
            grouped.add(tokens[start:end])
            for token in tokens[start:end]:
                single.add([token])
            assert grouped.text == single.text
        assert grouped.final() == single.final()


def test_a_stop_string_that_did_not_count_does_not_count_later(tokenizer: ChatTokenizer) -> None:
    growing = Detokenizer(tokenizer)
    stops = (".", "one that begins long before it")
    for token in tokenizer.encode("1. 2"):
        growing.add([token])
    for token in tokenizer.encode("3"):
        growing.add([token], stops)
    assert growing.stop_at is None
    for token in tokenizer.encode("."):
        growing.add([token], stops)
    assert growing.stop_at == len("1. 23")
