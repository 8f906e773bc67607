"""Text of one completion while its tokens come: pieces that are certain to stay, and where a stop string ends it."""

from collections.abc import Sequence

from parallm.model.chat.tokenizer import ChatTokenizer, GrowingText


class Detokenizer:
    """Begun with the first token that is added: a completion that nobody needs text of before its end has none."""

    def __init__(self) -> None:
        self.stop_at: int | None = None
        """Characters before the first stop string, once there is one."""
        self._growing: GrowingText | None = None
        self._num_shown = 0

    @property
    def has_begun(self) -> bool:
        return self._growing is not None

    def add(self, token: int, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        """Take a token, and look for stop strings that end in its text."""
        if self._growing is None:
            self._growing = GrowingText(tokenizer)
        known = len(self._growing.text)
        self._growing.add(token)
        longest = max(map(len, stops), default=0)
        found = [self._growing.text.find(stop, max(0, known - longest + 1)) for stop in stops]
        self.stop_at = min((place for place in found if place >= 0), default=None)

    def certain(self, stops: Sequence[str]) -> str:
        """Text so far without an end that might become a stop string."""
        text = self._growing.text if self._growing else ""
        held = 0
        for stop in stops:
            lengths = range(min(len(stop) - 1, len(text)), 0, -1)
            held = max(held, next((n for n in lengths if text.endswith(stop[:n])), 0))
        return text[: len(text) - held]

    def unshown(self, text: str) -> str:
        """What `text` has beyond what this has given out before."""
        delta = text[self._num_shown :]
        self._num_shown += len(delta)
        return delta

    def final(self) -> str:
        """All of it, once it has begun and no token comes any more."""
        assert self._growing is not None
        if self.stop_at is not None:
            return self._growing.text[: self.stop_at]
        self._growing.finish()
        return self._growing.text
