"""Logits processors: bias, minimum length, penalties and grammar masks, in this order.

`Decoder.sample` applies them where a request asks for one. They change which tokens are sampled, and not the reported
log-probs. A repetition penalty (https://arxiv.org/abs/1909.05858) counts tokens of prompt and completion; presence and
frequency penalties those of the completion only. The counts of a sequence stay on the device, V integers, because the
newest token may not be read when the next one is sampled; sequences without penalties have none.

Axes: B rows of the step, R rows with penalties, C changes of single logits, W bytes of a mask, V vocabulary.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.engine.sequence import Sequence

IN_PROMPT = 1 << 24
"""Added to the count of a token that the prompt has."""
ALL_ALLOWED = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyCounts:
    """Sequences with penalties, and what they have sampled."""

    sequences: Ordered[Sequence]
    num_counted: Ordered[int]
    """Sampled tokens of each sequence that are in the counts."""
    counts_RV: mx.array


class LogitsProcessors:
    """Those of one decoder's sequences, from step to step."""

    def __init__(self, eos_tokens: frozenset[int]) -> None:
        self._eos_tokens = eos_tokens
        self.counts: PenaltyCounts | None = None
        """Counts of the sequences with penalties; None frees their memory."""

    def process(self, logits_BV: mx.array, sequences: Ordered[Sequence], positions_B: Ordered[int]) -> mx.array | None:
        """Logits to sample from, float32; None where no sequence has a processor.

        `positions_B`: tokens that each sequence has sampled before; `count` was called for all of them.
        """
        num_tokens = logits_BV.shape[1]
        changes = _changes(sequences, positions_B, num_tokens, self._eos_tokens)
        penalised = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.has_penalties]
        self.counts = self._aligned([sequences[r] for r in penalised], [positions_B[r] for r in penalised], num_tokens)
        allowed = [sequence.allowed for sequence in sequences]
        has_masks = any(mask is not None for mask in allowed)
        if not changes and not penalised and not has_masks:
            return None
        processed_BV = logits_BV.astype(mx.float32)
        if changes:
            rows_C, tokens_C, values_C = zip(*changes, strict=True)
            processed_BV = processed_BV.at[mx.array(rows_C), mx.array(tokens_C)].add(mx.array(values_C, mx.float32))
        if self.counts is not None:
            rows_R = mx.array(penalised)
            processed_BV = processed_BV[...]  # a new name for the written array
            processed_BV[rows_R] = _penalised_logits(processed_BV[rows_R], self.counts)
        return masked(processed_BV, allowed) if has_masks else processed_BV

    def count(self, sequences: Ordered[Sequence], tokens_B: mx.array) -> None:
        """Count the tokens that the step has sampled; they need not be evaluated."""
        counts = self.counts
        if counts is not None:
            row_of = {sequence: row for row, sequence in enumerate(sequences)}
            tokens_R = tokens_B[mx.array([row_of[sequence] for sequence in counts.sequences])]
            self.counts = PenaltyCounts(
                sequences=counts.sequences,
                num_counted=[number + 1 for number in counts.num_counted],
                counts_RV=counts.counts_RV.at[mx.arange(len(counts.sequences)), tokens_R].add(1),
            )

    def _aligned(
        self, sequences: Ordered[Sequence], positions_R: Ordered[int], num_tokens: int
    ) -> PenaltyCounts | None:
        """The counts of these sequences, some of which may be new, or restarted."""
        if not sequences:
            return None
        counts = self.counts
        if counts and list(counts.sequences) == list(sequences) and list(counts.num_counted) == list(positions_R):
            return counts
        present = zip(counts.sequences, counts.num_counted, strict=True) if counts else ()
        rows = {key: row for row, key in enumerate(present)}
        keys = list(zip(sequences, positions_R, strict=True))
        new = [key for key in keys if key not in rows]
        parts = [] if counts is None else [counts.counts_RV]
        if new:
            parts.append(mx.array(np.stack([_count_tokens(sequence, num_tokens) for sequence, _ in new])))
        rows |= {key: len(rows) + row for row, key in enumerate(new)}
        counts_RV = mx.concatenate(parts)[mx.array([rows[key] for key in keys])]
        return PenaltyCounts(sequences=sequences, num_counted=positions_R, counts_RV=counts_RV)


def masked(logits_BV: mx.array, allowed_B: Ordered[bytes | None]) -> mx.array:
    """-inf for what a row's mask does not allow (`TokenMask.allowed`; None: no mask), in the dtype of the logits."""
    num_tokens = logits_BV.shape[1]
    num_bytes = -(-num_tokens // 8)
    bits_BW = np.zeros((len(allowed_B), num_bytes), np.uint8)
    for row, allowed in enumerate(allowed_B):
        if allowed is None:
            bits_BW[row] = ALL_ALLOWED
        else:
            mask = np.frombuffer(allowed, np.uint8)[:num_bytes]
            bits_BW[row, : len(mask)] = mask
    shifts_8 = mx.arange(8, dtype=mx.uint8)
    bits_BV = ((mx.array(bits_BW)[:, :, None] >> shifts_8) & 1).reshape(len(allowed_B), -1)[:, :num_tokens]
    return mx.where(bits_BV.astype(mx.bool_), logits_BV, -mx.inf)


def _changes(
    sequences: Ordered[Sequence], positions_B: Ordered[int], num_tokens: int, eos_tokens: frozenset[int]
) -> list[tuple[int, int, float]]:
    """(row, token, what is added to its logit)."""
    changes: list[tuple[int, int, float]] = []
    for row, (sequence, position) in enumerate(zip(sequences, positions_B, strict=True)):
        sampling = sequence.request.sampling
        changes.extend((row, token, bias) for token, bias in sampling.logit_bias)
        if position < sampling.min_tokens:
            end_tokens = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_tokens)}
            changes.extend((row, token, -np.inf) for token in sorted(end_tokens) if token < num_tokens)
    return changes


def _count_tokens(sequence: Sequence, num_tokens: int) -> npt.NDArray[np.int32]:
    """Counts of each token in the completion, plus `IN_PROMPT` for those of the prompt, (V,)."""
    counts_V = np.bincount(np.array(sequence.tokens, np.int64), minlength=num_tokens).astype(np.int32)
    counts_V[np.array(sequence.request.prompt_tokens)] += IN_PROMPT
    return counts_V


def _penalised_logits(logits_RV: mx.array, counts: PenaltyCounts) -> mx.array:
    samplings = [sequence.request.sampling for sequence in counts.sequences]
    repetition_R1 = mx.array([[sampling.repetition_penalty] for sampling in samplings], mx.float32)
    frequency_R1 = mx.array([[sampling.frequency_penalty] for sampling in samplings], mx.float32)
    presence_R1 = mx.array([[sampling.presence_penalty] for sampling in samplings], mx.float32)
    sampled_RV = counts.counts_RV & (IN_PROMPT - 1)
    repeated_RV = mx.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    penalised_RV = mx.where(counts.counts_RV > 0, repeated_RV, logits_RV)
    return penalised_RV - frequency_R1 * sampled_RV - presence_R1 * (sampled_RV > 0)
