"""The rows of one lane on their way through decode steps. A step is launched first, and read later.

The next step may be launched before the present one is read: it feeds the present one's tokens as the array that the
device has yet to compute. What that samples for a row that turns out to have ended before is dropped. Where a row has a
grammar, only the forward is launched so: the step is sampled once the one before is read, as the next mask needs it.

Where drafts say what may follow a row's newest token (`speculation.py`), the step feeds them behind it and samples one
token behind each, with the noise of its position. These are what steps of one token each would sample, as far as the
drafts are what was sampled before them; behind the first that is not, what was sampled is dropped.

Axes: B rows of a forward, H hidden, V vocabulary, F of them that feed a token.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np

from parallm.engine.decode_batch import DecodeBatch
from parallm.engine.sampling.logits_processors import LogitsProcessors
from parallm.engine.sampling.sampler import RowSampling, SampledTokens, row_sampling, sample
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.speculation import Speculation
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels.cuda import interned_array
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel
from parallm.types import TopLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A launched step that waits for the masks of its rows to be sampled."""

    rows: Ordered[Sequence]
    logits_BV: mx.array
    positions_B: Ordered[int]
    fed_F: mx.array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A launched step: one token for each of `rows`, which may have left their lane by the time it is read.

    A row that feeds drafts is there several times in turn.
    """

    rows: Ordered[Sequence]
    sampled: SampledTokens
    output_2B: mx.array
    """Tokens, and the bits of log-probabilities, int32: one array to read, and one that the next step does not use."""
    fed_F: mx.array | None = None
    """What the first of `rows` were fed, where there are drafts among it; no step is launched before this is read."""

    def arrays(self) -> list[mx.array]:
        """What is read of it."""
        every = (self.output_2B, self.sampled.top_tokens_BK, self.sampled.top_logprobs_BK, self.fed_F)
        return [array for array in every if array is not None]

    def read(self, tokenizer: ChatTokenizer, max_context: int) -> list[Sequence]:
        """Append each row's tokens, and wait for them if need be; the rows that got some: those that have not left."""
        tokens_B, bits_B = np.array(self.output_2B)
        parts = (tokens_B.tolist(), bits_B.view(np.float32).tolist(), _top_logprobs(self.sampled, len(tokens_B)))
        fed = [] if self.fed_F is None else self.fed_F.tolist()
        drafts = [*fed[1:], *[None] * (len(self.rows) - max(len(fed) - 1, 0))]  # of the same row, if it has one more
        read: list[Sequence] = []
        done: Sequence | None = None  # what follows of this row is dropped
        for row, token, logprob, top, draft in zip(self.rows, *parts, drafts, strict=True):
            if row.has_left or row is done:
                continue
            row.append(token, logprob, top, tokenizer, max_context)
            if read and read[-1] is row:
                row.num_accepted += 1
            else:
                read.append(row)
            if row.finish_reason is not None or token != draft:
                done = row
        for row in read if fed else ():
            row.num_launched = len(row.tokens)
        return read


class Decoder:
    """Launches the steps of one lane's rows."""

    def __init__(
        self, model: SharedModel, loras: LoraSelector, batch: DecodeBatch, speculation: Speculation, stream: mx.Stream
    ) -> None:
        self.in_flight: Step | None = None
        """Launched and not read; whoever reads it takes it from here."""
        self._model = model
        self._loras = loras
        self.batch = batch
        """Its keys and values; rows join and leave through the decoder."""
        self._first_logits: list[mx.array] = []  # (V,) of each row that has joined since the last step
        self._sampling: RowSampling | None = None  # of the rows that were sampled last
        self._sampled_rows: Ordered[Sequence] = ()
        self._adjustments = LogitsProcessors(model.tokenizer.eos_token_ids)
        self._waiting: Forward | None = None
        self._speculation = speculation
        self._stream = stream  # of its lane, so that the first pools of all lanes are made at the same time

    @property
    def rows(self) -> list[Sequence]:
        return self.batch.rows

    def take(self) -> Step | None:
        """The step in flight, to be read now."""
        step, self.in_flight = self.in_flight, None
        return step

    def join(self, joining: Ordered[tuple[PrefillJob, Sequence]]) -> None:
        """Add rows that continue computed prompts: the next step samples their first tokens."""
        for _, some in groupby(joining, key=lambda one: id(one[0].cache)):
            prompts, sequences = zip(*some, strict=True)
            with mx.stream(self._stream):
                self.batch.join(sequences, prompts[0].cache, [prompt.cache_row for prompt in prompts])
        self._speculation.join([member for _, member in joining])
        self._first_logits += [prompt.logits_V for prompt, _ in joining if prompt.logits_V is not None]

    def leave(self, rows: Ordered[int], *, waits: bool) -> None:
        """Take rows out for good, between steps; `waits`: see `DecodeBatch.leave`."""
        if rows:
            for row in rows:
                self.rows[row].has_left = True
            self._speculation.leave([self.rows[row] for row in rows])
            self.batch.leave(rows, waits=waits)
        if not self.rows:
            self._adjustments.clear()
            self._sampled_rows = ()

    def goes_on(self, max_context: int) -> bool:
        """Whether a row may need another token: one at its limit ends with the step in flight, unread as it is."""
        return any(not row.is_launched_whole(max_context) for row in self.rows)

    @property
    def waits_to_be_read(self) -> bool:
        """Whether the step in flight is to be read before the next one is launched."""
        step = self.in_flight
        return step is not None and (step.fed_F is not None or self._speculation.is_worth_waiting(self.rows))

    @property
    def waits_for_masks(self) -> bool:
        """Whether the step that was launched is to be sampled, by `sample`, when the one before is read."""
        return self._waiting is not None

    def launch(self) -> list[mx.array]:
        """Build the next step of all rows, which is in flight from now on unless it waits for masks; not evaluated."""
        num_running = len(self.rows) - len(self._first_logits)
        logits = [mx.stack(self._first_logits)] if self._first_logits else []
        fed = self._speculation.feed(self.rows[:num_running], self.batch.num_positions)
        if num_running:
            tokens_B = fed.tokens_F if fed else self._newest_tokens(self.rows[:num_running])
            hidden_BH = self.batch.forward(self._loras, num_running, tokens_B, fed.widths if fed else ())
            logits.insert(0, self._model.head(hidden_BH))
        self._first_logits = []
        widths = [*(fed.widths if fed else [1] * num_running), *[1] * (len(self.rows) - num_running)]
        steps = list(zip(self.rows, widths, strict=True))
        rows = [row for row, width in steps for _ in range(width)]
        positions_B = [row.num_launched + place for row, width in steps for place in range(width)]
        for row, width in steps:
            row.num_launched += width
        logits_BV, fed_F = mx.concatenate(logits), fed.tokens_F if fed else None
        self._waiting = Forward(rows=rows, logits_BV=logits_BV, positions_B=positions_B, fed_F=fed_F)
        if any(row.allowed is not None for row in self.rows):
            return [self._waiting.logits_BV]
        return self.sample()

    def sample(self) -> list[mx.array]:
        """Build the sampling of the step that was launched, which is in flight from now on; not evaluated.

        Rows that have left since the launch are sampled along, and dropped when the step is read.
        """
        forward, self._waiting = self._waiting, None
        assert forward is not None, "nothing was launched"
        if self._sampling is None or self._sampled_rows != forward.rows:
            params = [row.request.sampling for row in forward.rows]
            self._sampling = row_sampling(params, [row.seed for row in forward.rows])
            self._sampled_rows = forward.rows
        if self._sampling.has_logits_processors:
            adjusted_BV = self._adjustments.adjusted(forward.logits_BV, forward.rows, forward.positions_B)
            sampled = sample(forward.logits_BV, self._sampling, forward.positions_B, adjusted_BV)
            self._adjustments.count(forward.rows, sampled.tokens_B)
        else:
            self._adjustments.clear()
            sampled = sample(forward.logits_BV, self._sampling, forward.positions_B)
        output_2B = mx.stack([sampled.tokens_B, sampled.logprobs_B.view(mx.int32)])
        self.in_flight = Step(rows=forward.rows, sampled=sampled, output_2B=output_2B, fed_F=forward.fed_F)
        return self.in_flight.arrays()

    def _newest_tokens(self, rows: list[Sequence]) -> mx.array:
        """(B,) int32: from the step in flight, of whose rows some may have left, or as they were read."""
        if self.in_flight is None:
            return mx.array([row.tokens[-1] for row in rows], mx.int32)
        tokens_B = self.in_flight.sampled.tokens_B
        if self.in_flight.rows == rows:
            return tokens_B
        places = {row: place for place, row in enumerate(self.in_flight.rows)}
        wanted = tuple(places[row] for row in rows)
        if wanted == tuple(range(len(wanted))):
            return tokens_B[: len(wanted)]
        return tokens_B[interned_array(wanted, mx.int32)]


def _top_logprobs(sampled: SampledTokens, num_rows: int) -> Ordered[Ordered[TopLogprob]]:
    if sampled.top_tokens_BK is None or sampled.top_logprobs_BK is None:
        return [()] * num_rows
    rows = zip(sampled.top_tokens_BK.tolist(), sampled.top_logprobs_BK.tolist(), strict=True)
    return [[TopLogprob(token, logprob) for token, logprob in zip(*row, strict=True)] for row in rows]
