"""What rows ask for beyond the policy's own distribution: bias, a least length, penalties and grammars, in this order.

It changes what tokens are sampled, and not the log-probs that are told of them. A repetition penalty
(https://arxiv.org/abs/1909.05858) counts tokens of prompt and completion; presence and frequency penalties those of the
completion only. The counts of a row that asks stay on the device, V integers, as the newest token may not be read yet
when the next one is sampled; other rows have none.

Axes: B rows of the step, R rows with penalties, C changes of single logits, V vocabulary.
"""

from collections.abc import Sequence as Ordered
from collections.abc import Sequence as Sequence_token_masks
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.engine.sequence import Sequence

EVERYTHING = 0xFF


def masked(logits_BV: mx.array, allowed_B: Sequence_token_masks[bytes | None]) -> mx.array:
    """-inf for what a row's mask does not allow (`TokenMask.allowed`; None: no mask), in the dtype of the logits."""
    num_tokens = logits_BV.shape[1]
    num_bytes = -(-num_tokens // 8)
    bits_BW = np.zeros((len(allowed_B), num_bytes), np.uint8)
    for row, allowed in enumerate(allowed_B):
        if allowed is None:
            bits_BW[row] = EVERYTHING
        else:
            known = np.frombuffer(allowed, np.uint8)[:num_bytes]
            bits_BW[row, : len(known)] = known
    places_8 = mx.arange(8, dtype=mx.uint8)
    bits_BV = ((mx.array(bits_BW)[:, :, None] >> places_8) & 1).reshape(len(allowed_B), -1)[:, :num_tokens]
    return mx.where(bits_BV.astype(mx.bool_), logits_BV, -mx.inf)


IN_PROMPT = 1 << 24  # added to a token's count in the completion


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyCounts:
    """Rows with penalties, and what they have sampled."""

    rows: Ordered[Sequence]
    num_counted: Ordered[int]
    """Sampled tokens of each row that are in the counts."""
    counts_RV: mx.array


class LogitsProcessors:
    """Of the rows of one decoder, from step to step."""

    def __init__(self, end_tokens: frozenset[int]) -> None:
        self._end_tokens = end_tokens
        self._penalised: PenaltyCounts | None = None

    def adjusted(self, logits_BV: mx.array, rows: Ordered[Sequence], positions_B: Ordered[int]) -> mx.array | None:
        """Logits to sample from, float32; None where no row asks for other ones than the policy's.

        `positions_B`: tokens that each row has sampled before, of which `count` has been told.
        """
        num_tokens = logits_BV.shape[1]
        changes = _changes(rows, positions_B, num_tokens, self._end_tokens)
        asking = [place for place, row in enumerate(rows) if row.request.sampling.has_penalties]
        of_asking = [rows[place] for place in asking], [positions_B[place] for place in asking]
        self._penalised = self._aligned(*of_asking, num_tokens)
        allowed = [row.allowed for row in rows]
        if not changes and not asking and all(one is None for one in allowed):
            return None
        found_BV = logits_BV.astype(mx.float32)
        if changes:
            rows_C, tokens_C, values_C = zip(*changes, strict=True)
            found_BV = found_BV.at[mx.array(rows_C), mx.array(tokens_C)].add(mx.array(values_C, mx.float32))
        if self._penalised is not None:
            rows_R = mx.array(asking)
            found_BV = found_BV[...]  # a name of its own for what is written
            found_BV[rows_R] = _penalised_logits(found_BV[rows_R], self._penalised)
        return found_BV if all(one is None for one in allowed) else masked(found_BV, allowed)

    def count(self, rows: Ordered[Sequence], tokens_B: mx.array) -> None:
        """Take note of the tokens that the step has sampled for `rows`; they need not be evaluated."""
        known = self._penalised
        if known is not None:
            places = {row: place for place, row in enumerate(rows)}
            tokens_R = tokens_B[mx.array([places[row] for row in known.rows])]
            self._penalised = PenaltyCounts(
                rows=known.rows,
                num_counted=[number + 1 for number in known.num_counted],
                counts_RV=known.counts_RV.at[mx.arange(len(known.rows)), tokens_R].add(1),
            )

    def clear(self) -> None:
        """Give the counts up: no present row has penalties."""
        self._penalised = None

    def _aligned(self, rows: Ordered[Sequence], positions_R: Ordered[int], num_tokens: int) -> PenaltyCounts | None:
        """The counts of these rows, of which some may be new, or have begun anew."""
        if not rows:
            return None
        known = self._penalised
        if known is not None and list(known.rows) == list(rows) and list(known.num_counted) == list(positions_R):
            return known
        places: dict[tuple[Sequence, int], int] = {}
        if known is not None:
            places = {key: place for place, key in enumerate(zip(known.rows, known.num_counted, strict=True))}
        wanted = list(zip(rows, positions_R, strict=True))
        fresh = [key for key in wanted if key not in places]
        parts = [] if known is None else [known.counts_RV]
        if fresh:
            parts.append(mx.array(np.stack([_counted(row, num_tokens) for row, _ in fresh])))
        places |= {key: len(places) + place for place, key in enumerate(fresh)}
        counts_RV = mx.concatenate(parts)[mx.array([places[key] for key in wanted])]
        return PenaltyCounts(rows=rows, num_counted=positions_R, counts_RV=counts_RV)


def _changes(
    rows: Ordered[Sequence], positions_B: Ordered[int], num_tokens: int, end_tokens: frozenset[int]
) -> list[tuple[int, int, float]]:
    """(row, token, what is added to its logit)."""
    found: list[tuple[int, int, float]] = []
    for place, (row, position) in enumerate(zip(rows, positions_B, strict=True)):
        sampling = row.request.sampling
        found.extend((place, token, bias) for token, bias in sampling.logit_bias)
        if position < sampling.min_tokens:
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_tokens)}
            found.extend((place, token, -np.inf) for token in sorted(ends) if token < num_tokens)
    return found


def _counted(row: Sequence, num_tokens: int) -> npt.NDArray[np.int32]:
    """How often the completion has each token, and `IN_PROMPT` for those of the prompt, (V,)."""
    counts_V = np.bincount(np.array(row.tokens, np.int64), minlength=num_tokens).astype(np.int32)
    counts_V[np.array(row.request.prompt_tokens)] += IN_PROMPT
    return counts_V


def _penalised_logits(logits_RV: mx.array, penalised: PenaltyCounts) -> mx.array:
    samplings = [row.request.sampling for row in penalised.rows]
    repetition_R1 = mx.array([[sampling.repetition_penalty] for sampling in samplings], mx.float32)
    frequency_R1 = mx.array([[sampling.frequency_penalty] for sampling in samplings], mx.float32)
    presence_R1 = mx.array([[sampling.presence_penalty] for sampling in samplings], mx.float32)
    sampled_RV = penalised.counts_RV & (IN_PROMPT - 1)
    repeated_RV = mx.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    found_RV = mx.where(penalised.counts_RV > 0, repeated_RV, logits_RV)
    return found_RV - frequency_R1 * sampled_RV - presence_R1 * (sampled_RV > 0)
