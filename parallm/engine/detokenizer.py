"""Incremental text of one completion: the part that no later token changes, and the stop string that ends it."""

from collections.abc import Sequence

from parallm.model.chat.tokenizer import ChatTokenizer

REPLACEMENT = "\ufffd"  # what decoders give for a character whose bytes are not complete yet
SILENT_TOKENS = 8
"""So many tokens without text, such as hidden ones, are no beginning of a character, which has at most 4 bytes; nor are
so many that end in no character."""


class Detokenizer:
    """Decodes only from the last safe index, so the cost of a token is bounded."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.text = ""
        self.stop_at: int | None = None
        """Characters before the first stop string, once there is one."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._safe = 0  # tokens before this are in `text`
        self._context = 0  # decoding starts here: a tokenizer may write a token differently at the start of a text
        self._num_shown = 0

    def add(self, token: int, stops: Sequence[str] = ()) -> None:
        """Append a token: `text` grows by the characters that are complete, in which stop strings may end."""
        self._tokens.append(token)
        num_before, more, end = len(self.text), self._after_safe(), len(self._tokens)
        if end - self._safe >= SILENT_TOKENS and more.endswith(REPLACEMENT):
            # A character has at most four tokens, so one of these ends is between two. Or all that is here is none.
            for end in range(len(self._tokens) - 4, len(self._tokens) - 8, -1):
                more = self._after_safe(end)
                if not more.endswith(REPLACEMENT):
                    break
            self._take(more, end)
        elif end - self._safe >= SILENT_TOKENS or (more and not more.endswith(REPLACEMENT)):
            self._take(more, end)
        # each from where it would end in new text: before a minimum of tokens there may be some that do not count
        matches = [self.text.find(stop, max(0, num_before - len(stop) + 1)) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

    def _take(self, more: str, end: int) -> None:
        """Let `text` grow by that of the tokens before `end`."""
        self.text += more
        self._context, self._safe = self._safe, end

    def certain(self, stops: Sequence[str]) -> str:
        """Text so far without an end that might become a stop string."""
        num_held = 0
        for stop in stops:
            lengths = range(min(len(stop) - 1, len(self.text)), 0, -1)
            num_held = max(num_held, next((n for n in lengths if self.text.endswith(stop[:n])), 0))
        return self.text[: len(self.text) - num_held]

    def unshown(self, text: str) -> str:
        """The end of `text` that no earlier call has returned."""
        delta = text[self._num_shown :]
        self._num_shown += len(delta)
        return delta

    def final(self) -> str:
        """The whole text after the last token, incomplete characters as they are."""
        return self.text + self._after_safe() if self.stop_at is None else self.text[: self.stop_at]

    def _after_safe(self, end: int | None = None) -> str:
        """The text of the tokens that are not in `text`, to the last one or before `end`."""
        before = self._tokenizer.decode(self._tokens[self._context : self._safe])
        return self._tokenizer.decode(self._tokens[self._context : end])[len(before) :]
