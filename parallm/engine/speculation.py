"""Speculative decoding: drafts are fed along with a sequence's newest token, and one forward verifies all of them.

A step with drafts samples after each what a step of its own would have sampled, and drafts are accepted up to the first
mismatch: tokens and log-probs are those without drafts. Nothing is accepted by chance (as in
https://arxiv.org/abs/2211.17192). Drafts come from n-gram lookup
(https://github.com/apoorvumang/prompt-lookup-decoding) in the prompt and all completions of a request. All are fed
while a step of few rows costs hardly less, then as long as another row of the forward is expected to bring more tokens
than its time costs; those that are not are watched, too.

Each decoder calls `feed` before a step. Used on the device thread; any thread may read the numbers.
"""

import logging
from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.engine.sequence import Sequence
from parallm.engine.settings import SpeculationSettings
from parallm.errors import ConfigError
from parallm.model.attention import MIN_ROWS
from parallm.model.shared_model import SharedModel

FIXED_COST = 8
"""Cost of a step before its rows, in rows: 8 for 25 million parameters, 16 for one million (CPU, one core each)."""
MAX_ROWS = 32
"""Sequences of a stream: with more, rows of a forward cost nearly as much as they bring, and lookups add up."""
MAX_NGRAM = 4
"""Tokens of a lookup; shorter n-grams follow where it finds nothing. More tokens hardly ever decide."""
PRIOR = (0.2, 0.3, 0.4, 0.5)
"""Prior acceptance rate after a match of 1, 2, 3 and 4 tokens: about what GSM8K's solutions give."""
PRIOR_WEIGHT = 4.0
DECAY = 0.97
"""Weight of earlier observations with each new one."""
MIN_CHANCE = 0.05
"""Least acceptance rate of a draft: sampling and Python cost a little even where the forward does not."""
WORTH_WAITING = 0.5
"""Accepted tokens per sequence and step from which drafts are worth a step that is not launched ahead."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Tokens that sequences feed, each with its drafts after it (F in all, int32), and the number of each sequence."""

    tokens_F: mx.array
    query_lengths: Ordered[int]


@dataclass(slots=True)
class Draft:
    """What may follow the tokens of a sequence."""

    tokens: Ordered[int]
    """At least one."""
    num_matched: int
    """Length of the matching n-gram, 1 to MAX_NGRAM."""
    num_before: int = field(default=0, compare=False)
    """Tokens of the sequence when the draft was made."""
    num_fed: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Text:
    """Prompt and completion of one sequence; n-grams that end before `num_indexed` are in the lookup."""

    tokens: list[int]
    num_indexed: int


@dataclass(slots=True)
class NgramLookup:
    """N-grams of one request: of its prompt and all its completions."""

    prompt: Ordered[int]
    _texts: dict[Hashable, _Text] = field(default_factory=dict)
    _ends: dict[tuple[int, ...], tuple[_Text, int]] = field(default_factory=dict)
    """Last occurrence of an n-gram: the text, and the position after it."""

    def propose(self, sequence: Hashable, completion: Ordered[int], max_tokens: int) -> Draft | None:
        """A draft of what may follow the tokens of a sequence, which are indexed first."""
        tokens = self.learn(sequence, completion)
        for num_matched in range(min(MAX_NGRAM, len(tokens)), 0, -1):
            match = self._ends.get(tuple(tokens[len(tokens) - num_matched :]))
            if match is not None:
                text, end = match
                return Draft(text.tokens[end : end + max_tokens], num_matched, len(completion))
        return None

    def learn(self, sequence: Hashable, completion: Ordered[int]) -> Ordered[int]:
        """Index what a sequence has sampled; returns its tokens from the prompt on."""
        if sequence not in self._texts:
            # the prompt's own n-grams are indexed once, with the first sequence
            self._texts[sequence] = _Text(list(self.prompt), max(1, len(self.prompt) if self._texts else 1))
        text = self._texts[sequence]
        text.tokens += completion[len(text.tokens) - len(self.prompt) :]
        for end in range(text.num_indexed, len(text.tokens)):
            for size in range(1, min(MAX_NGRAM, end) + 1):
                self._ends[tuple(text.tokens[end - size : end])] = (text, end)
        text.num_indexed = max(text.num_indexed, len(text.tokens))
        return text.tokens


@dataclass(slots=True)
class AcceptanceRates:
    """Acceptance rates of drafts, by the number of tokens that matched before them."""

    _seen: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * MAX_NGRAM)
    _right: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * rate for rate in PRIOR])

    def survivals(self, draft: Draft) -> list[float]:
        """For each token of a draft the chance that it and all before it are right."""
        chances: list[float] = []
        for i in range(len(draft.tokens)):
            matched = min(draft.num_matched + i, MAX_NGRAM) - 1
            chances.append((chances[-1] if chances else 1.0) * self._right[matched] / self._seen[matched])
        return chances

    def learn(self, draft: Draft, tokens: Ordered[int]) -> int:
        """Compare a draft with the tokens that came, which may be fewer; returns how many were right."""
        for i, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
            matched = min(draft.num_matched + i, MAX_NGRAM) - 1
            self._seen[matched] = DECAY * self._seen[matched] + 1
            self._right[matched] = DECAY * self._right[matched] + (drafted == token)
            if drafted != token:
                return i
        return min(len(draft.tokens), len(tokens))


@dataclass(slots=True, kw_only=True)
class RequestDrafts:
    """Lookup and rates that the sequences of one request share."""

    lookup: NgramLookup
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    sequences: set[Sequence] = field(default_factory=set)
    ended: list[Sequence] = field(default_factory=list)
    """Sequences whose last tokens the lookup has not indexed."""


class Speculation:
    def __init__(self, settings: SpeculationSettings, *, is_on: bool) -> None:
        self.num_drafts = 0
        """Times that a sequence was fed drafts."""
        self.num_drafted = 0
        """Tokens of these drafts."""
        self.num_accepted = 0
        """Draft tokens that the policy sampled, too, as far as later steps have shown."""
        self._max_tokens = settings.num_tokens
        self._is_on = is_on
        self._requests: dict[str, RequestDrafts] = {}
        self._pending: dict[Sequence, Draft] = {}

    def join(self, sequences: Ordered[Sequence]) -> None:
        """Take sequences that decode from now on."""
        for sequence in sequences if self._is_on else ():
            request = sequence.request
            if request.request_id not in self._requests:
                self._requests[request.request_id] = RequestDrafts(lookup=NgramLookup(request.prompt_tokens))
            self._requests[request.request_id].sequences.add(sequence)

    def leave(self, sequences: Ordered[Sequence]) -> None:
        """Forget sequences, which may come back after a preemption. One that an error kept from joining is fine."""
        for sequence in sequences if self._is_on else ():
            drafts = self._requests.get(sequence.request.request_id)
            if drafts is None or sequence not in drafts.sequences:
                continue
            self._learn(drafts, sequence)
            drafts.sequences.remove(sequence)
            drafts.ended.append(sequence)
            if not drafts.sequences:
                del self._requests[sequence.request.request_id]

    def feed(self, sequences: Ordered[Sequence], num_positions: int) -> Fed | None:
        """Tokens and drafts to feed for the sequences of a stream, whose slots have `num_positions`; None: the newest
        token of each.

        Sequences whose tokens are still in flight get no drafts.
        """
        if not self._is_on or not 0 < len(sequences) <= MAX_ROWS:
            return None
        drafts: list[Ordered[int]] = [()] * len(sequences)
        candidates: list[tuple[float, int, int]] = []  # (-chance, index of the sequence, index in its draft)
        for index, sequence in enumerate(sequences):
            most = min(self._max_tokens, sequence.num_left - 1, num_positions - sequence.num_cached - 1)
            proposed = self._propose(sequence, most)
            if proposed is not None:
                drafts[index] = proposed.tokens
                survivals = self._requests[sequence.request.request_id].rates.survivals(proposed)
                candidates += [(-chance, index, i) for i, chance in enumerate(survivals)]
        query_lengths = _query_lengths(sorted(candidates), len(sequences))
        if max(query_lengths) == 1 or any(one.num_launched != len(one.tokens) for one in sequences):
            return None
        tokens: list[int] = []
        for sequence, draft, length in zip(sequences, drafts, query_lengths, strict=True):
            tokens += [sequence.tokens[-1], *draft[: length - 1]]
            if length > 1:
                self._pending[sequence].num_fed = length - 1
                sequence.num_drafted += length - 1
                self.num_drafts += 1
                self.num_drafted += length - 1
        return Fed(tokens_F=mx.array(tokens, mx.int32), query_lengths=query_lengths)

    def is_worth_waiting(self, sequences: Ordered[Sequence]) -> bool:
        """Whether enough drafts for these sequences, whose newest tokens are in flight, are likely to be accepted."""
        if not self._is_on or not 0 < len(sequences) <= MAX_ROWS:
            return False
        expected = 0.0
        for sequence in sequences:
            if sequence in self._pending:
                expected += sum(self._requests[sequence.request.request_id].rates.survivals(self._pending[sequence]))
        return expected >= WORTH_WAITING * len(sequences)

    def _propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """Look up what may follow the tokens of a sequence, and learn from what did follow before."""
        sampling, drafts = sequence.request.sampling, self._requests[sequence.request.request_id]
        self._learn(drafts, sequence)
        if max_tokens <= 0 or not sequence.tokens or sampling.has_penalties or sampling.grammar is not None:
            return None  # a penalty counts the tokens before, and a grammar's mask depends on them
        for ended in drafts.ended:
            drafts.lookup.learn(ended, ended.tokens)
        drafts.ended.clear()
        draft = drafts.lookup.propose(sequence, sequence.tokens, max_tokens)
        if draft is not None:
            self._pending[sequence] = draft
        return draft

    def _learn(self, drafts: RequestDrafts, sequence: Sequence) -> None:
        draft = self._pending.pop(sequence, None)
        if draft is not None:
            num_right = drafts.rates.learn(draft, sequence.tokens[draft.num_before :])
            self.num_accepted += min(num_right, draft.num_fed)


def make_speculation(settings: SpeculationSettings, model: SharedModel) -> Speculation:
    """Raises ConfigError where the settings ask for speculation by name and the model does not allow it."""
    is_on = settings.method == "ngram"
    if settings.method != "none" and not model.is_batch_invariant:
        what = "its layers keep states" if model.has_states else "it runs row by row"
        reason = f"{model.name} cannot take back what a row has computed: {what}"
        if is_on:
            raise ConfigError(f"engine.speculation.method=ngram: {reason}; use auto or none")
        logger.info("no speculation: %s", reason)
    elif settings.method == "auto":
        # on a GPU Python bounds a step, which is launched ahead and has kernels for one token per sequence
        is_on = mx.default_device() == mx.Device(mx.cpu)
    return Speculation(settings, is_on=is_on)


def _query_lengths(candidates: Ordered[tuple[float, int, int]], num_sequences: int) -> list[int]:
    """Tokens to feed of each sequence: the likeliest drafts, as long as they are worth their time."""
    lengths, num_fed, expected = [1] * num_sequences, num_sequences, float(num_sequences)
    for negative_chance, index, _ in candidates:
        is_free = num_fed < MIN_ROWS and -negative_chance >= MIN_CHANCE
        if not is_free and -negative_chance * (FIXED_COST + num_fed) < expected:
            break
        lengths[index] += 1
        num_fed += 1
        expected -= negative_chance
    return lengths
