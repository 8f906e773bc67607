"""Incremental text of one completion: the part that no later token changes, and the stop string that ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallm.model.chat.tokenizer import ChatTokenizer, GrowingText


@dataclass(slots=True)
class Detokenizer:
    """Holds no text until the first token is added: a completion that is only read at its end needs none before."""

    growing: GrowingText | None = None
    stop_at: int | None = None
    """Characters before the first stop string, once there is one."""
    _num_shown: int = 0

    def add(self, token: int, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        """Add a token, and look for stop strings that end in its text."""
        if self.growing is None:
            self.growing = GrowingText(tokenizer)
        num_before = len(self.growing.text)
        self.growing.add(token)
        start = max(0, num_before - max(map(len, stops), default=0) + 1)
        matches = [self.growing.text.find(stop, start) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

    def certain(self, stops: Sequence[str]) -> str:
        """Text so far without an end that might become a stop string."""
        text = self.growing.text if self.growing else ""
        num_held = 0
        for stop in stops:
            lengths = range(min(len(stop) - 1, len(text)), 0, -1)
            num_held = max(num_held, next((n for n in lengths if text.endswith(stop[:n])), 0))
        return text[: len(text) - num_held]

    def unshown(self, text: str) -> str:
        """The end of `text` that no earlier call has returned."""
        delta = text[self._num_shown :]
        self._num_shown += len(delta)
        return delta

    def final(self) -> str:
        """The whole text after the last token."""
        assert self.growing is not None
        if self.stop_at is not None:
            return self.growing.text[: self.stop_at]
        self.growing.finish()
        return self.growing.text
