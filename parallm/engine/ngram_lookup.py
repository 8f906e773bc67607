"""Drafts from text that is there already: what followed the last tokens where they came before.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) over the prompt and all completions of a request,
as completions of one prompt resemble one another.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

LONGEST_NGRAM = 4
"""Tokens that are looked up together, and fewer where so many have not been seen; more hardly ever decides."""


@dataclass(frozen=True, slots=True)
class Proposal:
    tokens: Sequence[int]
    """That may follow; at least one."""
    num_matched: int
    """The last so many tokens came before these, 1 to LONGEST_NGRAM."""


@dataclass(slots=True)
class _Stream:
    """Prompt and completion of one row, of which n-grams that end before `num_indexed` are known."""

    tokens: list[int]
    num_indexed: int


@dataclass(slots=True)
class NgramLookup:
    """Of one request."""

    prompt: Sequence[int]
    _streams: dict[Hashable, _Stream] = field(default_factory=dict)
    _ends: dict[tuple[int, ...], tuple[_Stream, int]] = field(default_factory=dict)
    """Where an n-gram ended the last time: of which stream, and the position behind it."""

    def propose(self, row: Hashable, completion: Sequence[int], most: int) -> Proposal | None:
        """What may follow the tokens of a row, at most `most` of them; takes note of those it has not seen yet."""
        tokens = self.learn(row, completion)
        length = len(tokens)
        for num_matched in range(min(LONGEST_NGRAM, length), 0, -1):
            found = self._ends.get(tuple(tokens[length - num_matched :]))
            if found is not None:
                return Proposal(found[0].tokens[found[1] : found[1] + most], num_matched)
        return None

    def learn(self, row: Hashable, completion: Sequence[int]) -> Sequence[int]:
        """Take note of what a row has sampled; its tokens from the prompt on."""
        stream = self._stream(row)
        stream.tokens += completion[len(stream.tokens) - len(self.prompt) :]
        for end in range(stream.num_indexed, len(stream.tokens)):
            self._note(stream, end)
        stream.num_indexed = max(stream.num_indexed, len(stream.tokens))
        return stream.tokens

    def _stream(self, row: Hashable) -> _Stream:
        if row not in self._streams:
            # the prompt's own n-grams are noted once, with the first row
            num_indexed = max(1, len(self.prompt) if self._streams else 1)
            self._streams[row] = _Stream(list(self.prompt), num_indexed)
        return self._streams[row]

    def _note(self, stream: _Stream, end: int) -> None:
        """The n-grams that end before position `end`, where a token follows."""
        for size in range(1, min(LONGEST_NGRAM, end) + 1):
            self._ends[tuple(stream.tokens[end - size : end])] = (stream, end)
