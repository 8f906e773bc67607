"""Decode steps of the sequences of one stream: a step is launched first and read later.

With asynchronous scheduling (see the README) a step feeds the tokens of the one before as the array that the device has
yet to compute. A step with drafts (`speculation.py`) samples a token after each.

Axes: B rows of a forward, H hidden, V vocabulary, F rows that feed a token.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.engine.decode_batch import SequentialDecodeBatch, SlotDecodeBatch
from parallm.engine.paged_batch import PagedDecodeBatch
from parallm.engine.sampling.logits_processors import LogitsProcessors
from parallm.engine.sampling.sampler import RowSampling, SampledTokens, read_alternatives, row_sampling, sample
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.speculation import Speculation
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels.cuda import uploaded
from parallm.model.kernels.gather import take_rows
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel
from parallm.types import TopLogprob

DecodeBatch = SlotDecodeBatch | SequentialDecodeBatch | PagedDecodeBatch
SampledRows = tuple[list[int], list[float], Ordered[tuple[TopLogprob, ...]]]
"""Token, log-prob and alternatives of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A launched forward whose sampling waits for grammar masks."""

    sequences: Ordered[Sequence]
    logits_BV: mx.array
    positions_B: Ordered[int]
    fed_F: mx.array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A launched step: row b is a token of `sequences[b]`, which may have left its decoder when the step is read. A
    sequence that feeds drafts has several rows in turn."""

    sequences: Ordered[Sequence]
    sampled: SampledTokens
    fed_F: mx.array | None = None
    """Tokens that the first rows fed; None without drafts. With drafts no step is launched before this one is read."""

    def arrays(self) -> list[mx.array]:
        """The arrays that `read` reads."""
        return [*self.sampled.arrays(), *([] if self.fed_F is None else [self.fed_F])]

    def read(self, tokenizer: ChatTokenizer) -> tuple[list[Sequence], int]:
        """Append each sequence's tokens, once `arrays` are evaluated; returns the sequences that got some, and how many
        tokens these are."""
        tokens_B, logprobs_B = self.sampled.read()
        tops = read_alternatives(self.sampled.top, len(tokens_B))
        rows = tokens_B.tolist(), logprobs_B.tolist(), tops
        if self.fed_F is not None:
            return self._read_drafts(rows, self.fed_F.tolist(), tokenizer)
        read: list[Sequence] = []
        for sequence, token, logprob, top in zip(self.sequences, *rows, strict=True):
            if not sequence.has_left:
                sequence.append(token, logprob, top, tokenizer)
                read.append(sequence)
        return read, len(read)

    def _read_drafts(self, rows: SampledRows, fed: list[int], tokenizer: ChatTokenizer) -> tuple[list[Sequence], int]:
        """`read` where the first rows fed `fed`."""
        drafts = [*fed[1:], *[None] * (len(self.sequences) - len(fed) + 1)]  # what the next row has fed
        read: list[Sequence] = []
        num_tokens = 0
        done: Sequence | None = None  # its further rows are dropped
        for sequence, token, logprob, top, draft in zip(self.sequences, *rows, drafts, strict=True):
            if sequence.has_left or sequence is done:
                continue
            sequence.append(token, logprob, top, tokenizer)
            num_tokens += 1
            if read and read[-1] is sequence:
                sequence.num_accepted += 1
            else:
                read.append(sequence)
            if sequence.finish_reason is not None or token != draft:
                done = sequence
        for sequence in read:
            sequence.num_launched = len(sequence.tokens)
        return read, num_tokens


class Decoder:
    """Launches the steps of one stream's decode batch."""

    def __init__(
        self, model: SharedModel, loras: LoraSelector, batch: DecodeBatch, speculation: Speculation, stream: mx.Stream
    ) -> None:
        self.in_flight: Step | None = None
        """The launched step that was not read; `take` hands it to the caller that reads it."""
        self._model = model
        self._loras = loras
        self.batch = batch
        """Sequences join and leave it through the decoder only."""
        self._first_logits: list[mx.array] = []  # (V,) of each sequence that joined since the last step
        self._sampling: RowSampling | None = None  # of the rows that were sampled last
        self._sampled: Ordered[Sequence] = ()
        self._processors = LogitsProcessors(model.tokenizer.eos_token_ids)
        self._unsampled: Forward | None = None
        self._speculation = speculation
        self._stream = stream

    @property
    def sequences(self) -> list[Sequence]:
        return self.batch.sequences

    def take(self) -> Step | None:
        """The step in flight; the caller reads it now."""
        step, self.in_flight = self.in_flight, None
        return step

    def join(self, joining: Ordered[tuple[PrefillJob, Sequence]]) -> None:
        """Add sequences of computed jobs; the next step samples their first tokens."""
        with mx.stream(self._stream):  # so that all streams create their first buffers at the same time
            self.batch.join(joining)
        self._speculation.join([sequence for _, sequence in joining])
        self._first_logits += [job.logits_V for job, _ in joining if job.logits_V is not None]

    def leave(self, indices: Ordered[int], *, waits: bool) -> None:
        """Remove sequences between steps; `waits`: see `SlotDecodeBatch.leave`."""
        if indices:
            for index in indices:
                self.sequences[index].has_left = True
            self._speculation.leave([self.sequences[index] for index in indices])
            self.batch.leave(indices, waits=waits)
        if not self.sequences:
            self._processors.counts = None
            self._sampled = ()

    @property
    def has_next_step(self) -> bool:
        """Whether a sequence may need another token; one at its limit ends with the step in flight."""
        return any(sequence.num_left > 0 for sequence in self.sequences)

    @property
    def waits_to_be_read(self) -> bool:
        """Whether the step in flight must be read before the next one is launched."""
        step = self.in_flight
        return step is not None and (step.fed_F is not None or self._speculation.is_worth_waiting(self.sequences))

    @property
    def waits_for_masks(self) -> bool:
        """Whether the launched forward is to be sampled, by `sample`, after the step before is read."""
        return self._unsampled is not None

    def launch(self) -> list[mx.array]:
        """Build the next step, which is in flight from now on unless it waits for masks; not evaluated."""
        num_running = len(self.sequences) - len(self._first_logits)
        running = self.sequences[:num_running]
        logits = [mx.stack(self._first_logits)] if self._first_logits else []
        fed = self._speculation.feed(running, self.batch.num_positions)
        if running:
            tokens_B = fed.tokens_F if fed else self._newest_tokens(running)
            hidden_BH = self.batch.forward(self._loras, num_running, tokens_B, fed.query_lengths if fed else ())
            logits.insert(0, self._model.head(hidden_BH))
        self._first_logits = []
        rows, positions_B = self._launched(fed.query_lengths if fed else ())
        logits_BV, fed_F = mx.concatenate(logits), fed.tokens_F if fed else None
        self._unsampled = Forward(sequences=rows, logits_BV=logits_BV, positions_B=positions_B, fed_F=fed_F)
        if [sequence for sequence in rows if sequence.allowed is not None]:
            return [logits_BV]
        return self.sample()

    def _launched(self, query_lengths: Ordered[int]) -> tuple[list[Sequence], list[int]]:
        """The sequence and the position of each row of a step, which count as launched. The device waits while Python
        walks the rows, so the usual step, a row for each, takes the shortest way."""
        if not query_lengths:
            rows, positions_B = list(self.sequences), [sequence.num_launched for sequence in self.sequences]
            for sequence in rows:
                sequence.num_launched += 1
            return rows, positions_B
        lengths = [*query_lengths, *[1] * (len(self.sequences) - len(query_lengths))]
        pairs = list(zip(self.sequences, lengths, strict=True))
        rows = [sequence for sequence, length in pairs for _ in range(length)]
        positions_B = [sequence.num_launched + i for sequence, length in pairs for i in range(length)]
        for sequence, length in pairs:
            sequence.num_launched += length
        return rows, positions_B

    def sample(self) -> list[mx.array]:
        """Build the sampling of the launched forward, which is in flight from now on; not evaluated."""
        forward, self._unsampled = self._unsampled, None
        assert forward is not None, "nothing was launched"
        rows, logits_BV, positions_B = forward.sequences, forward.logits_BV, forward.positions_B
        if self._sampling is None or self._sampled != rows:
            params = [sequence.request.sampling for sequence in rows]
            self._sampling = row_sampling(params, [sequence.seed for sequence in rows])
            self._sampled = rows
        if self._sampling.has_logits_processors:
            processed_BV = self._processors.process(logits_BV, rows, positions_B)
            sampled = sample(logits_BV, self._sampling, positions_B, processed_BV)
            self._processors.count(rows, sampled.tokens_B)
        else:
            self._processors.counts = None
            sampled = sample(logits_BV, self._sampling, positions_B)
        self.in_flight = Step(sequences=rows, sampled=sampled, fed_F=forward.fed_F)
        return self.in_flight.arrays()

    def _newest_tokens(self, sequences: list[Sequence]) -> mx.array:
        """(B,) int32: from the step in flight, some of whose sequences may have left, or as they were read."""
        if self.in_flight is None:
            return uploaded(np.array([sequence.tokens[-1] for sequence in sequences], np.int32))
        tokens_B = self.in_flight.sampled.tokens_B
        if self.in_flight.sequences == sequences:
            return tokens_B
        row_of = {sequence: row for row, sequence in enumerate(self.in_flight.sequences)}
        rows = tuple(row_of[sequence] for sequence in sequences)
        if rows == tuple(range(len(rows))):
            return tokens_B[: len(rows)]
        return take_rows(tokens_B[:, None], uploaded(np.array(rows, np.int32)))[:, 0]
