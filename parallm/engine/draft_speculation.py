"""Drafts from a second, small model with the same tokenizer (https://arxiv.org/abs/2211.17192, checked as all drafts).

It samples with the row's own temperature and filters and with the very noise that the policy will use at each position.
So where both models are sure of the same, or unsure in the same way, they take the same token, more often than by the
draft model's likeliest tokens. Its numbers need no exactness: they decide what is guessed, and nothing else.

Each row has caches of its own in the draft model, beside `engine.kv_cache_bytes`, so few rows draft at the same time.

Axes: F tokens fed, V vocabulary.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from parallm.engine.sampling.sampler import RowSampling, row_sampling, sample
from parallm.engine.sequence import Sequence
from parallm.engine.speculation import FIXED_COST, MEMORY, Fed
from parallm.model.attention import MIN_ROWS
from parallm.model.shared_model import SharedModel

MAX_ROWS = 4
"""Of a lane, each computed by itself."""
PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""How often a draft is right before anything is known of a row, and how many drafts that counts for."""
REST = 32
"""Tokens after which a row whose drafts did not pay is given some again."""
PROBE = 2
"""Drafts that it is given then."""
CHUNK = 512
"""Tokens that the draft model computes at once of what it has not seen."""


@dataclass(slots=True, kw_only=True)
class Drafting:
    """One row in the draft model."""

    cache: list[Any]
    sampling: RowSampling
    num_sure: int = 0
    """Tokens in the cache that are the row's own; behind them there may be drafts."""
    num_fed: int = 0
    """Drafts of the last step that had any, and tokens that the row had accepted before it."""
    num_accepted_before: int = 0
    seen: float = PRIOR_WEIGHT
    right: float = PRIOR * PRIOR_WEIGHT
    rested_at: int = 0
    """Tokens that the row had when it was given drafts last."""

    def settle(self, row: Sequence) -> None:
        """Learn what became of the last drafts, and which of them are the row's own tokens now."""
        num_right = row.num_accepted - self.num_accepted_before
        for is_right in [True] * num_right + [False] * (num_right < self.num_fed):
            self.seen, self.right = MEMORY * self.seen + 1, MEMORY * self.right + is_right
        self.num_sure += min(num_right, max(self.num_fed - 1, 0))  # the last draft is not in the cache
        self.num_fed, self.num_accepted_before = 0, row.num_accepted


@dataclass(slots=True, kw_only=True)
class DraftSpeculation:
    """Of all rows of an engine. Used on the device thread; its numbers from any."""

    model: SharedModel
    """That drafts."""
    most: int
    cost: float
    """Of a draft, in rows of a forward of the policy's model."""
    max_context: int
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    _rows: dict[Sequence, Drafting] = field(default_factory=dict)

    def join(self, rows: Ordered[Sequence]) -> None:
        """Rows begin with their first drafts."""

    def leave(self, rows: Ordered[Sequence]) -> None:
        for row in rows:
            if row in self._rows:
                self._settle(row)
                del self._rows[row]

    def feed(self, rows: Ordered[Sequence], num_positions: int) -> Fed | None:
        """As `NgramSpeculation.feed`."""
        if not 0 < len(rows) <= MAX_ROWS or any(row.num_launched != len(row.tokens) for row in rows):
            return None
        counts = [self._num_drafts(row, len(rows), num_positions) for row in rows]
        if not any(counts):
            return None
        tokens: list[mx.array] = []
        for row, count in zip(rows, counts, strict=True):
            tokens.append(mx.array(row.tokens[-1:], mx.int32))
            if count:
                tokens += self._draft(row, count)
        return Fed(tokens_F=mx.concatenate(tokens), widths=[count + 1 for count in counts])

    def is_worth_waiting(self, rows: Ordered[Sequence]) -> bool:
        return 0 < len(rows) <= MAX_ROWS and any(self._wanted(row, len(rows)) for row in rows)

    def _settle(self, row: Sequence) -> Drafting:
        if row not in self._rows:
            sampling = replace(row.request.sampling, top_logprobs=0)
            self._rows[row] = Drafting(cache=self.model.make_cache(), sampling=row_sampling([sampling], [row.seed]))
        drafting = self._rows[row]
        self.num_accepted += row.num_accepted - drafting.num_accepted_before
        drafting.settle(row)
        return drafting

    def _num_drafts(self, row: Sequence, num_rows: int, num_positions: int) -> int:
        sampling = row.request.sampling
        room = min(row.num_left(self.max_context) - 1, num_positions - row.num_cached - 1)
        if room <= 0 or not row.tokens or sampling.has_penalties or sampling.grammar is not None:
            return 0
        self._settle(row)
        return min(room, self._wanted(row, num_rows))

    def _wanted(self, row: Sequence, num_rows: int) -> int:
        """How many drafts bring most tokens for their time, where `num_rows` rows decode together."""
        drafting = self._rows.get(row)
        rate = drafting.right / drafting.seen if drafting else PRIOR
        best, best_speed, expected = 0, 0.0, float(num_rows)
        for count in range(self.most + 1):
            expected += rate**count if count else 0.0
            speed = expected / (FIXED_COST + max(MIN_ROWS, num_rows + count) + self.cost * count)
            if speed > best_speed:
                best, best_speed = count, speed
        if best == 0 and drafting is not None and len(row.tokens) - drafting.rested_at >= REST:
            return PROBE
        return best

    def _draft(self, row: Sequence, count: int) -> list[mx.array]:
        """The tokens that the draft model would sample behind the row's newest one, (1,) each; not evaluated."""
        drafting = self._rows[row]
        for layer in drafting.cache:
            layer.trim(layer.offset - drafting.num_sure)
        known = (*row.request.prompt_tokens, *row.tokens)
        for start in range(drafting.num_sure, len(known), CHUNK):
            newest_1T = mx.array([known[start : start + CHUNK]], mx.int32)
            hidden_1TH = self.model.hidden(newest_1T, drafting.cache, None)
        found: list[mx.array] = []
        for place in range(count):
            if found:
                hidden_1TH = self.model.hidden(found[-1][None], drafting.cache, None)
            logits_1V = self.model.head(hidden_1TH[:, -1])
            found.append(sample(logits_1V, drafting.sampling, [len(row.tokens) + place]).tokens_B)
        drafting.num_sure, drafting.num_fed, drafting.rested_at = len(known), count, len(row.tokens)
        row.num_drafted += count
        self.num_drafts += 1
        self.num_drafted += count
        return found
