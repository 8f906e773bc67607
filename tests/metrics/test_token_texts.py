"""Pieces of texts, with tokenizers made of bytes and of words."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from parallm.metrics.token_texts import TokenTexts

WORDS = ["", "▁12", "▁+", "▁3", "5", "▁"]


def by_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def by_words(tokens: Sequence[int]) -> str:
    """As SentencePiece decodes: the first space is dropped."""
    return "".join(WORDS[token] for token in tokens).replace("▁", " ").removeprefix(" ")


def texts_of(decode: Callable[[Sequence[int]], str]) -> TokenTexts:
    return TokenTexts(lambda rows: [decode(tokens) for tokens in rows])


def cut(texts: TokenTexts, rows: Sequence[Sequence[int]]) -> list[list[str]]:
    """The pieces of each row."""
    return [one.pieces() for one in texts.cut([np.array(row, np.int32) for row in rows])]


@pytest.mark.parametrize(
    "text", ["12 + 3", "zwölf", "十二", "👩‍👩‍👧 é", "e\u0301" * 9, "a\u202eb\u200bc\x00d", "", "\ufffd", "\u0627" * 40]
)
def test_pieces_of_bytes_join_to_the_text(text: str) -> None:
    tokens = list(text.encode())
    pieces = cut(texts_of(by_bytes), [tokens])[0]
    assert ("".join(pieces), len(pieces)) == (text, len(tokens))


def test_a_token_inside_of_a_character_has_no_text() -> None:
    assert cut(texts_of(by_bytes), [list("aé十b".encode())])[0] == ["a", "", "é", "", "", "十", "b"]


def test_bytes_that_are_no_text_are_shown_as_decoders_show_them() -> None:
    tokens = [0xFF, 0x61, 0xC3, 0xC3, 0xA9, 0xE5, *[0x80] * 30, 0xE5]
    pieces = cut(texts_of(by_bytes), [tokens])[0]
    assert ("".join(pieces), len(pieces)) == (by_bytes(tokens), len(tokens))


def test_a_first_space_that_the_tokenizer_drops_stands_before_later_tokens() -> None:
    texts = texts_of(by_words)
    assert cut(texts, [[1, 2, 3, 4], [], [2, 1]]) == [["12", " +", " 3", "5"], [], ["+", " 12"]]


def test_a_tokenizer_whose_texts_do_not_grow_gives_the_whole_text_to_the_last_token() -> None:
    pieces = cut(texts_of(lambda tokens: "".join(chr(65 + token) for token in reversed(tokens))), [[0, 1, 2]])[0]
    assert pieces == ["", "", "CBA"]


def test_the_usual_completion_is_cut_without_decoding_its_tokens_again() -> None:
    calls: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return by_bytes(tokens)

    texts = texts_of(decode)
    cut(texts, [list(b"abcabc")])
    calls.clear()
    cut(texts, [list(b"abccba" * 100)])
    assert calls == [1, 600]


def test_a_divided_character_costs_no_other_token_another_decoding() -> None:
    calls: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return by_bytes(tokens)

    texts = texts_of(decode)
    text = "a" * 100 + "é" + "b" * 100
    cut(texts, [list(text.encode())])
    calls.clear()
    assert "".join(cut(texts, [list(text.encode())])[0]) == text
    assert len(calls) < 10
