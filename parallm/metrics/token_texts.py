"""The text of a completion cut into one piece for each token, so that the pieces joined are the text.

A token is not a character: byte-level tokens may end inside of one. For one thread at a time. Other threads sample
meanwhile, so no line of Python runs for each token of a usual completion.
"""

from collections.abc import Callable, Sequence
from itertools import filterfalse, groupby

REPLACEMENT = "\ufffd"
"""What decoders give for a character whose bytes are not complete yet."""
MAX_PENDING = 8
"""A character has at most 4 bytes, so more tokens without a complete one are not the beginning of any."""

ROWS_AT_ONCE, TOKENS_AT_ONCE = 16, 512
"""Rows, and new tokens, whose texts are found before `throttle` is called."""


class _Known(dict[int, str]):
    """The texts of tokens; "" for others."""

    def __missing__(self, token: int) -> str:
        return ""


class TokenTexts:
    """Cuts texts of one tokenizer. A token that ends inside of a character has the text ""."""

    def __init__(self, decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]) -> None:
        """`decode` returns the text of each row of tokens, special ones shown. It gets several rows at once, so that it
        may work on them without the interpreter's lock."""
        self._decode = decode
        self._anchor: tuple[int, str] | None = None  # a token before others: some tokenizers drop a first space
        self._known = _Known()  # at most the vocabulary

    def cut(self, rows: Sequence[Sequence[int]], throttle: Callable[[], object] = lambda: None) -> list[list[str]]:
        """Return one piece for each token of each row. `throttle` is called after each small
        part of the work."""
        wholes, unknown = list[str](), set[int]()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            wholes += self._decode(rows[start : start + ROWS_AT_ONCE])
            throttle()
        for tokens in rows:
            unknown.update(filterfalse(self._known.__contains__, tokens[1:]))  # `difference` would walk all known ones
            throttle()
        self._learn(list(unknown), rows, throttle)
        firsts = self._decode([tokens[:1] for tokens in rows])
        pieces: list[list[str]] = []
        for row in zip(rows, firsts, wholes, strict=True):
            pieces.append(self._cut(*row))
            throttle()
        return pieces

    def _cut(self, tokens: Sequence[int], first: str, whole: str) -> list[str]:
        if not tokens:
            return []
        pieces = [first, *map(self._known.__getitem__, tokens[1:])]
        if "".join(pieces) != whole:
            pieces = self._with_parts_grown(tokens, pieces)
        if "".join(pieces) != whole:
            pieces = self._grown(tokens)
        return pieces if "".join(pieces) == whole else [*[""] * (len(tokens) - 1), whole]

    def _learn(self, unknown: Sequence[int], rows: Sequence[Sequence[int]], throttle: Callable[[], object]) -> None:
        """Remember the texts of tokens after other text, as far as they do not depend on it."""
        if unknown and self._anchor is None:
            alone = ((token, self._text([token])) for tokens in rows for token in tokens)
            self._anchor = next((pair for pair in alone if pair[1].isascii() and pair[1].strip()), None)
        if unknown and self._anchor is not None:
            before, before_text = self._anchor
            for start in range(0, len(unknown), TOKENS_AT_ONCE):
                some = unknown[start : start + TOKENS_AT_ONCE]
                texts = self._decode([[before, token] for token in some])
                self._known.update({token: text[len(before_text) :] for token, text in zip(some, texts, strict=True)})
                throttle()

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode([tokens])[0]

    def _with_parts_grown(self, tokens: Sequence[int], pieces: Sequence[str]) -> list[str]:
        """`pieces`, where tokens that are parts of characters have what they add to complete ones."""
        found: list[str] = []
        for is_part, run in groupby(range(len(tokens)), lambda place: REPLACEMENT in pieces[place]):
            places = list(run)
            own = slice(places[0], places[-1] + 1)
            found += self._grown(tokens[own]) if is_part else pieces[own]
        return found

    def _grown(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the complete characters. Decodes from the last complete one only."""
        pieces: list[str] = []
        context = safe = 0  # decoding starts at `context`; the text of tokens before `safe` is in `pieces`
        for end in range(1, len(tokens) + 1):
            before = self._text(tokens[context:safe])
            more = self._text(tokens[context:end])[len(before) :]
            is_whole = bool(more) and not more.endswith(REPLACEMENT)
            if is_whole or end - safe >= MAX_PENDING or end == len(tokens):
                pieces.append(more)
                context, safe = safe, end
            else:
                pieces.append("")
        return pieces
