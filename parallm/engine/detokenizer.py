"""Incremental text of one completion: the part that no later token changes, and the stop string that ends it."""

from collections.abc import Sequence

from parallm.model.chat.tokenizer import ChatTokenizer

REPLACEMENT = "\ufffd"  # what decoders give for a character whose bytes are not complete yet
SILENT_TOKENS = 8
"""A character has at most 4 bytes, and so at most as many tokens. This many tokens that are still no text, such as
hidden ones, or still end in no whole character, do not wait for one."""


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

    def add(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> None:
        """Append tokens: `text` grows by the characters that are complete, in which stop strings may end."""
        num_before = len(self.text)
        if not self._add_whole(tokens):
            for token in tokens:
                self._add_one(token)
        # A match ends in new text: one that ends before came with tokens whose stop strings did not count
        matches = [self.text.find(stop, max(0, num_before - len(stop) + 1)) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

    def _add_whole(self, tokens: Sequence[int]) -> bool:
        """Append several tokens that are whole characters; False, and nothing is appended, if they are not."""
        if len(tokens) < 2:
            return False
        num_before = len(self._tokens)
        self._tokens += tokens
        more = self._after_safe(len(self._tokens))
        if not more or REPLACEMENT in more:
            del self._tokens[num_before:]
            return False
        self.text += more
        self._context, self._safe = self._safe, len(self._tokens)
        return True

    def _add_one(self, token: int) -> None:
        self._tokens.append(token)
        end = len(self._tokens)
        more, is_long = self._after_safe(end), end - self._safe >= SILENT_TOKENS
        if is_long and more.endswith(REPLACEMENT):
            # A character has at most four tokens: one of these four ends is between two, or no character is here
            for end in range(len(self._tokens) - 4, len(self._tokens) - 8, -1):
                more = self._after_safe(end)
                if not more.endswith(REPLACEMENT):
                    break
        if is_long or (more and not more.endswith(REPLACEMENT)):
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
        return self.text + self._after_safe(len(self._tokens)) if self.stop_at is None else self.text[: self.stop_at]

    def _after_safe(self, end: int) -> str:
        """The text of the tokens before `end` that are not in `text`."""
        before = self._tokenizer.decode(self._tokens[self._context : self._safe])
        return self._tokenizer.decode(self._tokens[self._context : end])[len(before) :]
