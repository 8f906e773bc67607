"""Incremental text of one completion: the part that no later token changes, and the stop string that ends it."""

from collections.abc import Sequence

from parallm.model.chat.tokenizer import ChatTokenizer, GrowingText


class Detokenizer:
    """Holds no text until the first token is added: a completion that is only read at its end needs none before."""

    def __init__(self) -> None:
        self.stop_at: int | None = None
        """Characters before the first stop string, once there is one."""
        self._growing: GrowingText | None = None
        self._num_shown = 0

    @property
    def has_begun(self) -> bool:
        return self._growing is not None

    def add(self, token: int, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        """Add a token, and look for stop strings that end in its text."""
        if self._growing is None:
            self._growing = GrowingText(tokenizer)
        num_before = len(self._growing.text)
        self._growing.add(token)
        start = max(0, num_before - max(map(len, stops), default=0) + 1)
        matches = [self._growing.text.find(stop, start) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

    def certain(self, stops: Sequence[str]) -> str:
        """Text so far without an end that might become a stop string."""
        text = self._growing.text if self._growing else ""
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
        assert self._growing is not None
        if self.stop_at is not None:
            return self._growing.text[: self.stop_at]
        self._growing.finish()
        return self._growing.text
