"""Trajectory groups -> micro-batches: what one forward and backward pass computes.

The completions of a micro-batch share one prompt, which is computed once. Token ids are those that were sampled.
Axes: G completions, T longest completion, N all completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallm.learner.objective import Objective, group_advantages, token_weight
from parallm.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Lives for one update. Hidden state `columns_N[i]` of row `rows_N[i]` predicts token `tokens_N[i]`."""

    prompt: tuple[int, ...]
    """Shared by all rows; empty where each row's input holds its prompt itself."""
    inputs_GT: np.ndarray
    """int32, right-padded with zeros."""
    rows_N: np.ndarray
    columns_N: np.ndarray
    tokens_N: np.ndarray
    behaviour_N: np.ndarray
    """Log-probs that the engine sampled with, float32."""
    advantages_N: np.ndarray
    weights_N: np.ndarray
    temperature_N: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory with what the objective needs."""

    trajectory: Trajectory
    advantage: float
    weight: float
    """Of each trained token."""


def make_micro_batches(
    groups: Sequence[TrajectoryGroup], objective: Objective, *, max_tokens: int, budget: int, shares_prompts: bool
) -> list[MicroBatch]:
    """Split the step into passes of at most `budget` tokens (padding included; one row always fits).

    Rows keep their group; within it they are sorted by length, so that little is padding. With `shares_prompts` false
    every row is a pass of its own.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    num_tokens = sum(sum(trajectory.loss_mask) for trajectory in trajectories)
    batches: list[MicroBatch] = []
    for group in groups:
        advantages_G = group_advantages(group.rewards, objective.divide_by_std)
        rows = [
            Row(
                trajectory=trajectory,
                advantage=float(advantage),
                weight=token_weight(
                    objective,
                    length=sum(trajectory.loss_mask),
                    num_tokens=num_tokens,
                    num_completions=len(trajectories),
                    max_tokens=max_tokens,
                ),
            )
            for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True)
        ]
        batches += [_pack(part, shares_prompts) for part in _parts(rows, budget if shares_prompts else 0)]
    return batches


def _parts(rows: list[Row], budget: int) -> list[list[Row]]:
    """Split rows, longest first, into runs that cost the fewest tokens: each costs its prompt and its padded rows.

    A run stays within the budget, but one row always fits. Dynamic programming over the place of the last cut.
    """
    ordered = sorted(rows, key=lambda row: len(row.trajectory.tokens), reverse=True)
    prompt = len(rows[0].trajectory.prompt_tokens)
    lengths = [len(row.trajectory.tokens) for row in ordered]
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first `end` rows, and where their last run starts
    for end in range(1, len(ordered) + 1):
        costs = [
            (best[start][0] + prompt + lengths[start] * (end - start), start)
            for start in range(end)
            if start == end - 1 or prompt + lengths[start] * (end - start) <= budget
        ]
        best.append(min(costs))
    parts: list[list[Row]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        parts.insert(0, ordered[start:end])
        end = start
    return parts


def _pack(rows: list[Row], shares_prompts: bool) -> MicroBatch:
    prompt = rows[0].trajectory.prompt_tokens
    prefix: tuple[int, ...] = () if shares_prompts else prompt
    inputs = [(*prefix, *row.trajectory.tokens[:-1]) for row in rows]
    inputs_GT = np.zeros((len(rows), max(map(len, inputs))), np.int32)
    for place, tokens in enumerate(inputs):
        inputs_GT[place, : len(tokens)] = tokens
    lengths = [len(row.trajectory.tokens) for row in rows]
    first = 0 if shares_prompts else len(prompt) - 1
    return MicroBatch(
        prompt=prompt if shares_prompts else (),
        inputs_GT=inputs_GT,
        rows_N=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        columns_N=np.concatenate([np.arange(first, first + length, dtype=np.int32) for length in lengths]),
        tokens_N=np.concatenate([np.asarray(row.trajectory.tokens, np.int32) for row in rows]),
        behaviour_N=np.concatenate([np.asarray(row.trajectory.logprobs, np.float32) for row in rows]),
        advantages_N=np.repeat(np.asarray([row.advantage for row in rows], np.float32), lengths),
        weights_N=np.concatenate([np.asarray(row.trajectory.loss_mask, np.float32) * np.float32(row.weight) for row in rows]),
        temperature_N=np.repeat(np.asarray([row.trajectory.temperature for row in rows], np.float32), lengths),
    )
