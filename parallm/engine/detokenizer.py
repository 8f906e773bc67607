"""Incremental text of one completion: the part that no later token changes, and the stop string that ends it."""

from collections.abc import Sequence

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import SamplingParams, TokenEvent

REPLACEMENT = "\ufffd"  # what decoders give for a character whose bytes are not complete yet
SILENT_TOKENS = 8
"""So many tokens without text, such as hidden ones, are no beginning of a character, which has at most 4 bytes."""


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
        num_before = len(self.text)
        self._append([token])
        start = max(0, num_before - max(map(len, stops), default=0) + 1)
        matches = [self.text.find(stop, start) for stop in stops]
        self.stop_at = min((match for match in matches if match >= 0), default=None)

    def extend(self, tokens: Sequence[int]) -> None:
        """`add` of several tokens of a text without stop strings, as cheap as that of one."""
        if not self._append(tokens) and len(tokens) > 1:  # the last one begins a character
            del self._tokens[-len(tokens) :]
            for token in tokens:
                self._append([token])

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

    def _append(self, tokens: Sequence[int]) -> bool:
        """Append tokens; whether `text` has grown by them."""
        self._tokens += tokens
        more = self._after_safe()
        is_silent = not more and len(self._tokens) - self._safe >= SILENT_TOKENS
        if not is_silent and (not more or more.endswith(REPLACEMENT)):
            return False
        self.text += more
        self._context, self._safe = self._safe, len(self._tokens)
        return True

    def _after_safe(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._safe])
        return self._tokenizer.decode(self._tokens[self._context :])[len(before) :]


class StreamedText:
    """Text of a streamed completion without stop strings. It knows no state of the engine: usable on any thread."""

    def __init__(self, sampling: SamplingParams, tokenizer: ChatTokenizer) -> None:
        self._end_tokens = end_tokens(sampling, tokenizer)
        self._detokenizer = Detokenizer(tokenizer)

    def read(self, event: TokenEvent) -> str:
        """The text of the completion's next event; with its last one, all text that was held back."""
        completion, tokens = event.completion, event.tokens
        if completion is not None and completion.finish_reason == "stop" and tokens and tokens[-1] in self._end_tokens:
            tokens = tokens[:-1]
        self._detokenizer.extend(tokens)
        return self._detokenizer.unshown(self.whole() if completion else self._detokenizer.text)

    def whole(self) -> str:
        """The text of all events that were read, as that of a completion."""
        return self._detokenizer.final()


def end_tokens(sampling: SamplingParams, tokenizer: ChatTokenizer) -> frozenset[int]:
    """Tokens that end a completion and are no part of its text."""
    return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else tokenizer.eos_token_ids)))
