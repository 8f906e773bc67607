"""The text of a completion cut into one piece for each token, so that the pieces joined are the text.

A token is not a character: byte-level tokens may end inside of one. Pure Python, for one thread at a time.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders give for a character whose bytes are not complete yet."""
MAX_PENDING = 8
"""A character has at most 4 bytes, so more tokens without a complete one are not the beginning of any."""
MAX_REMEMBERED = 1 << 18


class TokenTexts:
    """Cuts texts of one tokenizer. A token that ends inside of a character has the text ""."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` returns the text of tokens, special ones shown."""
        self._decode = decode
        self._anchor: tuple[int, str] | None = None  # a token before others: some tokenizers drop a first space
        self._known: dict[int, str] = {}

    def cut(self, tokens: Sequence[int]) -> list[str]:
        """Return one piece for each token."""
        if not tokens:
            return []
        whole = self._decode(tokens)
        pieces = [self._decode(tokens[:1]), *map(self._piece, tokens[1:])]
        if "".join(pieces) == whole:
            return pieces
        pieces = self._grown(tokens)
        return pieces if "".join(pieces) == whole else [*[""] * (len(tokens) - 1), whole]

    def _piece(self, token: int) -> str:
        """The text of a token after other text, as far as it does not depend on it."""
        if (text := self._known.get(token)) is None:
            if self._anchor is None:
                alone = self._decode([token])
                if not alone.isascii() or not alone.strip():
                    return alone
                self._anchor = (token, alone)
            before, before_text = self._anchor
            text = self._decode([before, token])[len(before_text) :]
            if len(self._known) < MAX_REMEMBERED:
                self._known[token] = text
        return text

    def _grown(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the complete characters. Decodes from the last complete one only."""
        pieces: list[str] = []
        context = safe = 0  # decoding starts at `context`; the text of tokens before `safe` is in `pieces`
        for end in range(1, len(tokens) + 1):
            before = self._decode(tokens[context:safe])
            more = self._decode(tokens[context:end])[len(before) :]
            is_whole = bool(more) and not more.endswith(REPLACEMENT)
            if is_whole or end - safe >= MAX_PENDING or end == len(tokens):
                pieces.append(more)
                context, safe = safe, end
            else:
                pieces.append("")
        return pieces
