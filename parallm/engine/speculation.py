"""Speculation: tokens that may follow a row's newest one are fed along with it, and all are checked in one forward.

What a row samples at a position follows from the policy's logits there and from noise of seed and position. So a step
that feeds drafts samples, behind each, what a step of its own would have sampled had that draft been the token: drafts
are accepted as long as they are, and the first token behind is the policy's own. Tokens and log-probs are those without
drafts, at any temperature and with any filters; nothing is accepted by chance (as in https://arxiv.org/abs/2211.17192).

Drafts come from an n-gram lookup here, or from a second model (`draft_speculation.py`). How often they were right in
the same request, by the length of what was matched, says how many are fed: while a step of few rows costs hardly less,
all; then as long as a further row of the forward is expected to bring more tokens than its time costs. They are watched
while none are fed, which costs a lookup.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from collections.abc import Sequence as Sequence_ngram_lookup
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from parallm.engine.sequence import Sequence
from parallm.engine.settings import SpeculationSettings
from parallm.model.attention import MIN_ROWS

MAX_NGRAM = 4
"""Tokens that are looked up together, and fewer where so many have not been seen; more hardly ever decides."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    tokens: Sequence_ngram_lookup[int]
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

    prompt: Sequence_ngram_lookup[int]
    _streams: dict[Hashable, _Stream] = field(default_factory=dict)
    _ends: dict[tuple[int, ...], tuple[_Stream, int]] = field(default_factory=dict)
    """Where an n-gram ended the last time: of which stream, and the position behind it."""

    def propose(self, row: Hashable, completion: Sequence_ngram_lookup[int], most: int) -> DraftTokens | None:
        """What may follow the tokens of a row, at most `most` of them; takes note of those it has not seen yet."""
        tokens = self.learn(row, completion)
        length = len(tokens)
        for num_matched in range(min(MAX_NGRAM, length), 0, -1):
            found = self._ends.get(tuple(tokens[length - num_matched :]))
            if found is not None:
                return DraftTokens(found[0].tokens[found[1] : found[1] + most], num_matched)
        return None

    def learn(self, row: Hashable, completion: Sequence_ngram_lookup[int]) -> Sequence_ngram_lookup[int]:
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
        for size in range(1, min(MAX_NGRAM, end) + 1):
            self._ends[tuple(stream.tokens[end - size : end])] = (stream, end)


FIXED_COST = 8
"""What a step costs before its rows, in rows: 8 for 25 million parameters, 16 for one million (CPU, one core each)."""
MAX_ROWS = 32
"""Of a lane: where more decode, further rows of a forward cost nearly as much as they bring, and lookups add up."""
PRIOR = (0.2, 0.3, 0.4, 0.5)
"""How often the next token is right where 1, 2, 3 and 4 tokens matched: about what GSM8K's solutions give."""
PRIOR_WEIGHT = 4.0
MEMORY = 0.97
"""Of what was seen, how much counts when one more is."""
MIN_CHANCE = 0.05
"""Of being right that a draft must have: sampling and Python cost a little even where the forward does not."""
WORTH_WAITING = 0.5
"""Accepted tokens for each row and step from which drafts are worth a step that is not launched ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Tokens of rows in order, each with its drafts behind it, and how many of each row; F in all, int32."""

    tokens_F: mx.array
    widths: Ordered[int]


class Speculation(Protocol):
    """What a decoder asks for each step. Used on the device thread; its numbers from any."""

    num_drafts: int
    """Times that a row was fed drafts."""
    num_drafted: int
    """Tokens of them."""
    num_accepted: int
    """Of these, those that were what the policy sampled, as far as later steps have told."""

    def join(self, rows: Ordered[Sequence]) -> None:
        """Take note of rows that decode from now on."""

    def leave(self, rows: Ordered[Sequence]) -> None:
        """Forget rows, which may come back."""

    def feed(self, rows: Ordered[Sequence], num_positions: int) -> Fed | None:
        """What to feed these rows of a lane, which have room for `num_positions`; None: each its newest token alone.

        Rows whose tokens are still in flight get no drafts.
        """

    def is_worth_waiting(self, rows: Ordered[Sequence]) -> bool:
        """Whether drafts for these rows, whose newest tokens are in flight, are likely to be accepted enough."""


@dataclass(slots=True)
class Rates:
    """How often proposed tokens were right, by the number of tokens that matched before them."""

    _seen: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * MAX_NGRAM)
    _right: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * rate for rate in PRIOR])

    def survivals(self, proposal: DraftTokens) -> list[float]:
        """For each of its tokens, how likely it and all before it are right."""
        found: list[float] = []
        for place in range(len(proposal.tokens)):
            matched = min(proposal.num_matched + place, MAX_NGRAM) - 1
            found.append((found[-1] if found else 1.0) * self._right[matched] / self._seen[matched])
        return found

    def learn(self, proposal: DraftTokens, tokens: Ordered[int]) -> int:
        """Compare a proposal with the tokens that came, which may be fewer; how many were right."""
        for place, (proposed, token) in enumerate(zip(proposal.tokens, tokens, strict=False)):
            matched = min(proposal.num_matched + place, MAX_NGRAM) - 1
            self._seen[matched] = MEMORY * self._seen[matched] + 1
            self._right[matched] = MEMORY * self._right[matched] + (proposed == token)
            if proposed != token:
                return place
        return min(len(proposal.tokens), len(tokens))


@dataclass(slots=True, kw_only=True)
class Watched:
    """A proposal for what follows the first `num_tokens` tokens of a row; `num_fed` of it were fed."""

    proposal: DraftTokens
    num_tokens: int
    num_fed: int = 0


@dataclass(slots=True, kw_only=True)
class RequestDrafts:
    """The rows of one request, which learn from one another."""

    rows: set[Sequence] = field(default_factory=set)
    ended: list[Sequence] = field(default_factory=list)
    """That the lookup has not seen whole."""
    rates: Rates = field(default_factory=Rates)
    lookup: NgramLookup | None = None


class NgramSpeculation:
    """Drafts from what a request has said already."""

    def __init__(self, settings: SpeculationSettings, *, is_on: bool, max_context: int) -> None:
        """`is_on`: whether the model's rows can feed several tokens, and it shall pay here."""
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._most = settings.num_tokens
        self._is_on = is_on
        self._max_context = max_context
        self._groups: dict[str, RequestDrafts] = {}
        self._watched: dict[Sequence, Watched] = {}

    def join(self, rows: Ordered[Sequence]) -> None:
        for row in rows if self._is_on else ():
            self._groups.setdefault(row.request.request_id, RequestDrafts()).rows.add(row)

    def leave(self, rows: Ordered[Sequence]) -> None:
        for row in rows if self._is_on else ():
            group = self._groups[row.request.request_id]
            self._learn(group, row)
            group.rows.remove(row)
            group.ended.append(row)
            if not group.rows:
                del self._groups[row.request.request_id]

    def feed(self, rows: Ordered[Sequence], num_positions: int) -> Fed | None:
        if not self._is_on or not 0 < len(rows) <= MAX_ROWS:
            return None
        drafts: list[Ordered[int]] = [()] * len(rows)
        found: list[tuple[float, int, int]] = []  # (how likely it is right, place of its row, place in the proposal)
        for place, row in enumerate(rows):
            room = min(self._most, row.num_left(self._max_context) - 1, num_positions - row.num_cached - 1)
            watched = self._propose(row, room)
            if watched is not None:
                drafts[place] = watched.proposal.tokens
                rates = self._groups[row.request.request_id].rates
                found += [(-one, place, i) for i, one in enumerate(rates.survivals(watched.proposal))]
        widths = _widths(sorted(found), len(rows))
        if max(widths) == 1 or any(row.num_launched != len(row.tokens) for row in rows):
            return None
        tokens: list[int] = []
        for row, draft, width in zip(rows, drafts, widths, strict=True):
            tokens += [row.tokens[-1], *draft[: width - 1]]
            if width > 1:
                self._watched[row].num_fed = width - 1
                row.num_drafted += width - 1
                self.num_drafts += 1
                self.num_drafted += width - 1
        return Fed(tokens_F=mx.array(tokens, mx.int32), widths=widths)

    def is_worth_waiting(self, rows: Ordered[Sequence]) -> bool:
        if not self._is_on or not 0 < len(rows) <= MAX_ROWS:
            return False
        expected = 0.0
        for row in rows:
            if row in self._watched:
                rates = self._groups[row.request.request_id].rates
                expected += sum(rates.survivals(self._watched[row].proposal))
        return expected >= WORTH_WAITING * len(rows)

    def _propose(self, row: Sequence, most: int) -> Watched | None:
        """Look up what may follow the tokens of a row that are known, and learn from what did follow before."""
        sampling, group = row.request.sampling, self._groups[row.request.request_id]
        self._learn(group, row)
        if most <= 0 or not row.tokens or sampling.has_penalties or sampling.grammar is not None:
            return None  # a penalty counts the tokens before, and a grammar's mask follows from them
        if group.lookup is None:
            group.lookup = NgramLookup(row.request.prompt_tokens)
        for one in group.ended:
            group.lookup.learn(one, one.tokens)
        group.ended.clear()
        proposal = group.lookup.propose(row, row.tokens, most)
        if proposal is None:
            return None
        self._watched[row] = Watched(proposal=proposal, num_tokens=len(row.tokens))
        return self._watched[row]

    def _learn(self, group: RequestDrafts, row: Sequence) -> None:
        watched = self._watched.pop(row, None)
        if watched is not None:
            num_right = group.rates.learn(watched.proposal, row.tokens[watched.num_tokens :])
            self.num_accepted += min(num_right, watched.num_fed)


def _widths(found: Ordered[tuple[float, int, int]], num_rows: int) -> list[int]:
    """How many tokens to feed each row: the drafts that are worth their time, of those that are likeliest right."""
    widths, num_fed, expected = [1] * num_rows, num_rows, float(num_rows)
    for negative, place, _ in found:
        is_free = num_fed < MIN_ROWS and -negative >= MIN_CHANCE
        if not is_free and -negative * (FIXED_COST + num_fed) < expected:
            break
        widths[place] += 1
        num_fed += 1
        expected -= negative
    return widths
