"""Trajectory groups -> micro-batches: what one forward and backward pass computes.

The completions of a micro-batch share one prompt, which is computed once. Token ids are those that were sampled.
Axes: G completions, T longest completion, N all completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallm.learner.objective import Objective, group_advantages, token_weight
from parallm.model.attention import LEAST_ROWS
from parallm.types import Trajectory, TrajectoryGroup

RUN_OVERHEAD = 16  # what starting one more run costs, in tokens that could be computed instead (measured on a CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Completions of similar length, padded to a rectangle. Of their hidden states, those at rows and columns count."""

    inputs_GT: np.ndarray
    """int32, right-padded with zeros."""
    rows_N: np.ndarray
    columns_N: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Lives for one update. The runs' hidden states, one after the other, predict `tokens_N`."""

    prompt: tuple[int, ...]
    """Shared by all rows; empty where each row's input holds its prompt itself."""
    runs: tuple[Run, ...]
    tokens_N: np.ndarray
    behaviour_N: np.ndarray
    """Log-probs that the engine sampled with, float32."""
    advantages_N: np.ndarray
    weights_N: np.ndarray
    temperature_N: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    @property
    def num_computed(self) -> int:
        """Tokens of the forward pass, padding included."""
        return len(self.prompt) + sum(run.inputs_GT.size for run in self.runs)


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
    """Split the step into passes of at most `budget` tokens (padding included; one run always fits).

    Rows keep their group; within it rows of similar length run together, so that little is padding. With
    `shares_prompts` false every row is a pass of its own.
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
        runs = _runs(rows, budget) if shares_prompts else [[row] for row in rows]
        batches += [_pack(part, shares_prompts) for part in _passes(runs, budget if shares_prompts else 0)]
    return batches


def _runs(rows: list[Row], budget: int) -> list[list[Row]]:
    """Cut rows, longest first, into runs with the fewest padded tokens; a run of several rows stays in the budget.

    Dynamic programming over the place of the last cut.
    """
    ordered = sorted(rows, key=lambda row: len(row.trajectory.tokens), reverse=True)
    room = budget - len(rows[0].trajectory.prompt_tokens)
    lengths = [len(row.trajectory.tokens) for row in ordered]
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first `end` rows, and where their last run starts
    for end in range(1, len(ordered) + 1):
        starts = [start for start in range(end) if start == end - 1 or lengths[start] * (end - start) <= room]
        best.append(min((best[start][0] + lengths[start] * (end - start) + RUN_OVERHEAD, start) for start in starts))
    runs: list[list[Row]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        runs.insert(0, ordered[start:end])
        end = start
    return runs


def _passes(runs: list[list[Row]], budget: int) -> list[list[list[Row]]]:
    """Put runs of one group together while their padded tokens and one prompt stay within the budget."""
    prompt = len(runs[0][0].trajectory.prompt_tokens)
    passes: list[list[list[Row]]] = []
    used = 0
    for run in runs:
        size = len(run) * len(run[0].trajectory.tokens)
        if passes and used + size <= budget:
            passes[-1].append(run)
            used += size
        else:
            passes.append([run])
            used = prompt + size
    return passes


def _pack(runs: list[list[Row]], shares_prompts: bool) -> MicroBatch:
    rows = [row for run in runs for row in run]
    lengths = [len(row.trajectory.tokens) for row in rows]
    masks = [np.asarray(row.trajectory.loss_mask, np.float32) * np.float32(row.weight) for row in rows]
    return MicroBatch(
        prompt=rows[0].trajectory.prompt_tokens if shares_prompts else (),
        runs=tuple(_pack_run(run, shares_prompts) for run in runs),
        tokens_N=np.concatenate([np.asarray(row.trajectory.tokens, np.int32) for row in rows]),
        behaviour_N=np.concatenate([np.asarray(row.trajectory.logprobs, np.float32) for row in rows]),
        advantages_N=np.repeat(np.asarray([row.advantage for row in rows], np.float32), lengths),
        weights_N=np.concatenate(masks),
        temperature_N=np.repeat(np.asarray([row.trajectory.temperature for row in rows], np.float32), lengths),
    )


def _pack_run(rows: list[Row], shares_prompts: bool) -> Run:
    """With a shared prompt, column 0 is the prompt's last hidden state and column t that of completion token t - 1."""
    prompts = [() if shares_prompts else row.trajectory.prompt_tokens for row in rows]
    inputs = [(*prompt, *row.trajectory.tokens[:-1]) for prompt, row in zip(prompts, rows, strict=True)]
    width = max(map(len, inputs))
    if 0 < len(rows) * width < LEAST_ROWS:
        width = LEAST_ROWS  # a product of fewer rows would round differently from the engine's
    inputs_GT = np.zeros((len(rows), width), np.int32)
    for place, tokens in enumerate(inputs):
        inputs_GT[place, : len(tokens)] = tokens
    lengths = [len(row.trajectory.tokens) for row in rows]
    firsts = [max(0, len(prompt) - 1) for prompt in prompts]
    return Run(
        inputs_GT=inputs_GT,
        rows_N=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        columns_N=np.concatenate(
            [np.arange(first, first + length, dtype=np.int32) for first, length in zip(firsts, lengths, strict=True)]
        ),
    )
