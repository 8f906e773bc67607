"""Rows of token ids -> vectors or logits, in passes on the device thread.

Causal rows are packed as in training (`learner.passes.packing`), and what they all begin with is computed once.
Encoders get rectangles of rows of similar lengths. A row's numbers do not depend on the rows beside it.
Axes: N rows, S rows of a pass, M tokens of a pass, D numbers of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.lora.linear import LoraBinding
from parallm.model.shared_model import SharedModel
from parallm.model.task_head import Head, Projection
from parallm.tasks.pooling import pool
from parallm.types import TaskSpec

MIN_SHARED = 16
"""Tokens that rows have to begin with in common, before a prompt of their own pays."""
LENGTH_STEP = 16
"""Rows of encoders are padded to multiples of this, so that few shapes occur."""
Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How one name turns rows into numbers. Used on the device thread."""

    model: SharedModel
    streams: DeviceStreams
    spec: TaskSpec
    lora: LoraBinding | None
    head: Head | None
    """The head of a task with logits, unless `spec.answers` are its head."""
    projection: Projection | None = None
    """The dense modules of a model that makes vectors."""
    packs: bool
    """Whether the model is one whose rows can be packed; see `can_pack`."""
    budget: int
    """Tokens of a pass, unless one row has more."""

    def units(self, rows: Sequence[Row], first_lengths: Sequence[int]) -> Iterator[np.ndarray | None]:
        """Yield None after each round of passes, the numbers (N, D) of all rows last, float32."""
        numbers: list[np.ndarray | None] = [None] * len(rows)
        shared = self._num_shared(rows)
        passes = self._plan(rows, shared)
        for start in range(0, len(passes), self.streams.width):
            chosen = passes[start : start + self.streams.width]
            parts = self.streams.run(lambda indices: self.numbers(rows, indices, first_lengths, shared), chosen)
            mx.eval(parts)
            for indices, part_SD in zip(chosen, parts, strict=True):
                for index, row_D in zip(indices, np.array(part_SD), strict=True):
                    numbers[index] = row_D
            yield None
        yield np.stack([row_D for row_D in numbers if row_D is not None])

    def token_units(
        self, rows: Sequence[Row], names: Sequence[str]
    ) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
        """Yield the rows of each pass and their tokens' `last_hidden_state` (M, H) or `logits` (M, V), float32."""
        passes = self._plan(rows, 0)
        for start in range(0, len(passes), self.streams.width):
            chosen = passes[start : start + self.streams.width]
            parts = self.streams.run(lambda indices: self._of_tokens([rows[index] for index in indices], names), chosen)
            mx.eval(parts)
            for indices, part in zip(chosen, parts, strict=True):
                yield indices, {name: np.array(array_MD) for name, array_MD in part.items()}

    def _of_tokens(self, rows: Sequence[Row], names: Sequence[str]) -> dict[str, mx.array]:
        hidden_MH = self._encoded(rows, [len(row) for row in rows]) if self.model.is_encoder else self._hidden(rows)
        made = {"last_hidden_state": lambda: hidden_MH, "logits": lambda: self.model.head(hidden_MH)}
        return {name: made[name]().astype(mx.float32) for name in names}

    def _plan(self, rows: Sequence[Row], shared: int) -> list[list[int]]:
        """Indices of the rows of each pass; `shared` tokens of every row are computed once a pass."""
        sizes = [padded(len(row)) if self.model.is_encoder else len(row) - shared for row in rows]
        return neighbours(sizes, self.budget - shared, self.streams.width)

    def _num_shared(self, rows: Sequence[Row]) -> int:
        """Tokens that all rows begin with, if they are computed once: where only last tokens are read."""
        if len(rows) < 2 or not self.packs or self.spec.pooling != ("last",):
            return 0
        first, last = min(rows), max(rows)  # all others begin with what these two share
        most = min(map(len, rows)) - 1  # a row keeps a token of its own
        shared = next((index for index in range(most) if first[index] != last[index]), most)
        return shared if shared >= MIN_SHARED else 0

    def numbers(
        self, all_rows: Sequence[Row], indices: Sequence[int], first_lengths: Sequence[int] = (), shared: int = 0
    ) -> mx.array:
        """Numbers (S, D), float32, of the rows at `indices`, which all begin with the same `shared` tokens."""
        rows = [all_rows[index] for index in indices]
        if self.model.is_encoder:
            firsts = [first_lengths[index] for index in indices] if first_lengths else [len(row) for row in rows]
            pooled_SD = pool(self._encoded(rows, firsts), [len(row) for row in rows], self.spec.pooling)
        elif shared and len(rows) > 1:
            pooled_SD = self._after_shared(rows, shared)
        else:
            pooled_SD = pool(self._hidden(rows), [len(row) for row in rows], self.spec.pooling)
        if self.spec.answers:
            logits_SV = self.model.head(pooled_SD.astype(self.model.dtype))
            logits_SA = logits_SV[:, mx.array(self.spec.answers)].astype(mx.float32)
            return logits_SA[:, :1] - logits_SA[:, 1:].sum(axis=1, keepdims=True)
        if self.projection is not None:
            pooled_SD = self.projection(pooled_SD)
        return pooled_SD if self.head is None else self.head.logits(pooled_SD)

    def _encoded(self, rows: Sequence[Row], firsts: Sequence[int]) -> mx.array:
        """Hidden states (M, H) of an encoder, row after row without their padding."""
        tokens_ST = np.zeros((len(rows), padded(max(map(len, rows)))), np.int32)
        for index, row in enumerate(rows):
            tokens_ST[index, : len(row)] = row
        lengths = [len(row) for row in rows]
        with self.model.lora_context.applied(self.lora):
            hidden_STH = self.model.base(
                mx.array(tokens_ST), lengths_B=mx.array(lengths), first_lengths_B=mx.array(list(firsts))
            )
        return mx.concatenate([hidden_STH[index, :length] for index, length in enumerate(lengths)])

    def _hidden(self, rows: Sequence[Row]) -> mx.array:
        """Hidden states (M, H) of a causal model, row after row."""
        if not self.packs:
            hidden = [self.model.hidden(mx.array([row]), self.model.make_cache(), self.lora)[0, ...] for row in rows]
            return mx.concatenate(hidden)
        tokens_M = np.concatenate([np.asarray(row, np.int32) for row in rows])
        segments = [Segment(prompt=len(row)) for row in rows]
        return packed_hidden(self.model, mx.array(tokens_M), segments, self.lora)

    def _after_shared(self, rows: Sequence[Row], shared: int) -> mx.array:
        """Hidden states (S, H) of the last tokens of rows that begin with the same `shared` tokens, float32."""
        lengths = [len(row) - shared for row in rows]
        parts = (rows[0][:shared], *(row[shared:] for row in rows))
        tokens_M = np.concatenate([np.asarray(part, np.int32) for part in parts])
        segment = Segment(prompt=shared, runs=tuple((1, length) for length in lengths))
        hidden_MH = packed_hidden(self.model, mx.array(tokens_M), [segment], self.lora)
        ends = list(accumulate(lengths, initial=shared))[1:]
        return hidden_MH[mx.array(ends) - 1].astype(mx.float32)


def neighbours(sizes: Sequence[int], budget: int, streams: int) -> list[list[int]]:
    """Indices of items of similar `sizes`, in passes of at most `budget` or one item; the largest first.

    Items of one size come one after the other, so that a pass attends to them in one call. Few items are divided
    between the streams.
    """
    total, budget = sum(sizes), max(1, budget)
    share = total / (-(-total // (budget * streams)) * streams)
    passes: list[list[int]] = []
    room, filled = 0, 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if room < 1 or filled >= share:
            passes.append([])
            room, filled = max(1, budget // sizes[index]), 0
        passes[-1].append(index)
        room, filled = room - 1, filled + sizes[index]
    return passes


def padded(length: int) -> int:
    """Tokens of a row of this length in a rectangle."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP
