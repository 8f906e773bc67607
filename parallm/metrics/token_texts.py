"""The text of a completion cut into one piece for each token, so that the pieces joined are the text.

Axes: T tokens of a completion, V vocabulary.

A token is not a character: byte-level tokens may end inside of one. For one thread at a time. Other threads sample
meanwhile, so no line of Python runs for each token of a usual completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

REPLACEMENT = "\ufffd"
"""What decoders give for a character whose bytes are not complete yet."""
MAX_PENDING = 8
"""A character has at most 4 bytes, so more tokens without a complete one are not the beginning of any."""

ROWS_AT_ONCE, TOKENS_AT_ONCE = 16, 512
"""Rows, and new tokens, whose texts are found before `throttle` is called."""


@dataclass(frozen=True, slots=True, eq=False)
class CutText:
    """The text of a row of tokens."""

    text: str
    lengths_T: np.ndarray
    """Characters of each token's piece, int32."""

    @staticmethod
    def of(pieces: Sequence[str]) -> "CutText":
        return CutText("".join(pieces), np.fromiter(map(len, pieces), np.int32, len(pieces)))

    def pieces(self) -> list[str]:
        ends = np.cumsum(self.lengths_T, dtype=np.int64).tolist()
        return [self.text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


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
        self._lengths_V = np.zeros(0, np.int32)  # of the known texts; no text of others
        self._is_known_V = np.zeros(0, np.bool_)

    def cut(self, rows: Sequence[np.ndarray], throttle: Callable[[], object] = lambda: None) -> list[CutText]:
        """Return the text of each row of token ids (T,), cut. `throttle` is called after each small part of the
        work."""
        self._learn(self._unknown(rows), rows, throttle)
        cuts: list[CutText] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            arrays = rows[start : start + ROWS_AT_ONCE]
            some = [row.tolist() for row in arrays]
            firsts, wholes = self._decode([tokens[:1] for tokens in some]), self._decode(some)
            cuts += map(self._cut, arrays, some, firsts, wholes)
            throttle()
        return cuts

    def _cut(self, tokens_T: np.ndarray, tokens: Sequence[int], first: str, whole: str) -> CutText:
        if not tokens:
            return CutText.of([])
        pieces = [first, *map(self._known.__getitem__, tokens[1:])]
        if "".join(pieces) == whole:
            lengths_T = self._lengths_V[tokens_T]
            lengths_T[0] = len(first)
            return CutText(whole, lengths_T)
        pieces = self._with_parts_grown(tokens, pieces)
        if "".join(pieces) != whole:
            pieces = self._grown(tokens)
        return CutText.of(pieces if "".join(pieces) == whole else [*[""] * (len(tokens) - 1), whole])

    def _unknown(self, rows: Sequence[np.ndarray]) -> list[int]:
        """The tokens after a first one whose texts are not known."""
        later = [row[1:] for row in rows]
        more = max((int(row.max(initial=-1)) for row in rows), default=-1) + 1 - len(self._lengths_V)
        if more > 0:
            self._lengths_V = np.concatenate([self._lengths_V, np.zeros(more, np.int32)])
            self._is_known_V = np.concatenate([self._is_known_V, np.zeros(more, np.bool_)])
        unknown = [row[~self._is_known_V[row]] for row in later]
        found: list[int] = np.unique(np.concatenate([np.zeros(0, np.int32), *unknown])).tolist()
        return found

    def _learn(self, unknown: Sequence[int], rows: Sequence[np.ndarray], throttle: Callable[[], object]) -> None:
        """Remember the texts of tokens after other text, as far as they do not depend on it."""
        if unknown and self._anchor is None:
            alone = ((token, self._text([token])) for tokens in rows for token in tokens.tolist())
            self._anchor = next((pair for pair in alone if pair[1].isascii() and pair[1].strip()), None)
        if unknown and self._anchor is not None:
            before, before_text = self._anchor
            for start in range(0, len(unknown), TOKENS_AT_ONCE):
                some = unknown[start : start + TOKENS_AT_ONCE]
                texts = self._decode([[before, token] for token in some])
                own = [text[len(before_text) :] for text in texts]
                self._known.update(zip(some, own, strict=True))
                self._lengths_V[some], self._is_known_V[some] = list(map(len, own)), True
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
