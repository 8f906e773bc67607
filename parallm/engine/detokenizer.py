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
        self._tokens += tokens
        num_before, num_tokens = len(self.text), len(self._tokens)
        end, is_long = num_tokens, num_tokens - self._safe >= SILENT_TOKENS
        more = self._after_safe(end)
        if more.endswith(REPLACEMENT):
            # A character has at most four tokens: one of these ends is between two, or no character is here
            for end in range(num_tokens - 1, max(self._safe, num_tokens - SILENT_TOKENS), -1):
                more = self._after_safe(end)
                if not more.endswith(REPLACEMENT):
                    break
        if is_long or (more and not more.endswith(REPLACEMENT)):
            self.text += more
            self._context, self._safe = self._safe, end
        # A match ends in new text: one that ends before came with tokens whose stop strings did not count
        matches = [self.text.find(stop, max(0, num_before - len(stop) + 1)) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

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
