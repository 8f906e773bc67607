"""Trajectory groups -> micro-batches: what one forward and backward pass computes.

A micro-batch packs whole rows of one or more groups into one flat sequence of tokens (`packing`): each prompt once,
then the inputs of its completions. Token ids are those that were sampled.
Axes: M computed tokens, N completion tokens, in the order of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.objective import Objective, token_weight
from parallm.learner.passes.packing import Segment, padded_length
from parallm.types import Trajectory, TrajectoryGroup

MIXED_VERSIONS = -1
"""Instead of a version, for tokens that several versions have part in."""
RUN_OVERHEAD = 16  # what starting one more run costs, in tokens that could be computed instead (measured on a CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Lives for one update."""

    inputs_M: np.ndarray
    """int32. Runs are padded with zeros to rectangles."""
    segments: tuple[Segment, ...]
    """What is where in `inputs_M`; empty where it is one row's prompt and completion as they are."""
    sources_N: np.ndarray
    """Which of the M hidden states predicts each completion token, int32."""
    rows_N: np.ndarray
    """The row of each completion token, counted from 0 within the micro-batch, int32."""
    completions_S: np.ndarray
    """Which of the step's completions each row is, in the order of the groups, int32."""
    tokens_N: np.ndarray
    behaviour_N: np.ndarray
    """Log-probs that the engine sampled with, float32."""
    advantages_N: np.ndarray
    weights_N: np.ndarray
    temperature_N: np.ndarray
    versions_N: np.ndarray
    """The version that sampled a token and computed everything before it, int32; MIXED behind a switch of versions."""
    base_N: np.ndarray | None = None
    """Log-probs of the base without an adapter, where the objective needs them (`preparation`)."""
    entropy_threshold: float | None = None
    """Tokens of less entropy are not trained on."""

    @property
    def num_computed(self) -> int:
        """Tokens of the forward pass, padding included."""
        return len(self.inputs_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory with what the objective needs."""

    trajectory: Trajectory
    completion: int
    """Its place among the step's completions."""
    advantage: float
    """By its reward; advantages of its tokens are stronger."""
    weight: float
    """Of each trained token."""

    @property
    def length(self) -> int:
        """Tokens to compute behind the prompt: the last one predicts nothing."""
        return len(self.trajectory.tokens) - 1

    def advantages(self) -> np.ndarray:
        """float32, of each completion token."""
        own = self.trajectory.token_advantages
        return np.full(self.length + 1, self.advantage, np.float32) if own is None else np.asarray(own, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlock:
    """Runs of rows with one prompt: what is never cut further."""

    prompt: tuple[int, ...]
    runs: list[list[TrainingSample]]

    @property
    def is_one_row(self) -> bool:
        return len(self.runs) == 1 and len(self.runs[0]) == 1

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(run) * run[0].length for run in self.runs)


def make_micro_batches(
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    *,
    max_tokens: int,
    budget: int,
    streams: int = 1,
    packs: bool = True,
) -> list[MicroBatch]:
    """Split the step into passes of at most `budget` tokens (padding included; one run always fits), largest first.

    The number of passes is a multiple of `streams` where there is work for that many, and they are of similar size,
    since lanes run at the same time. With `packs` false every row is a pass of its own.
    """
    by_group = _rows(groups, objective, max_tokens)
    if not packs:
        every = [row for rows in by_group for row in rows]
        return [_plain_row(row) for row in sorted(every, key=lambda row: row.length, reverse=True)]
    alike = [same for rows in by_group for same in _by_prompt(rows)]
    parts = [part for rows in alike for part in _parts(_runs(rows, budget), budget)]
    return [_pack(chosen) for chosen in _fill(parts, budget, streams)]


def _rows(groups: Sequence[TrajectoryGroup], objective: Objective, max_tokens: int) -> list[list[TrainingSample]]:
    """The rows of each group with their advantages and weights; completions without a token have nothing to train."""
    num_tokens_S = [sum(trajectory.loss_mask) for group in groups for trajectory in group.trajectories]
    advantages_S = advantages(objective.advantage, [group.rewards for group in groups], num_tokens_S)
    places = count()

    def row(trajectory: Trajectory) -> TrainingSample:
        place = next(places)
        weight = token_weight(
            objective,
            length=num_tokens_S[place],
            num_tokens=sum(num_tokens_S),
            num_completions=len(num_tokens_S),
            max_tokens=max_tokens,
        )
        return TrainingSample(
            trajectory=trajectory, completion=place, advantage=float(advantages_S[place]), weight=weight
        )

    found = [[row(trajectory) for trajectory in group.trajectories] for group in groups]
    with_tokens = [[one for one in rows if one.trajectory.tokens] for rows in found]
    return [rows for rows in with_tokens if rows]


def _by_prompt(rows: list[TrainingSample]) -> list[list[TrainingSample]]:
    """The rows of one group that share a prompt, in their order."""
    found: dict[tuple[int, ...], list[TrainingSample]] = {}
    for row in rows:
        found.setdefault(row.trajectory.prompt_tokens, []).append(row)
    return list(found.values())


def _runs(rows: list[TrainingSample], budget: int) -> list[list[TrainingSample]]:
    """Cut rows, longest first, into runs with the fewest padded tokens; a run of several rows stays in the budget.

    Dynamic programming over the place of the last cut.
    """
    ordered = sorted(rows, key=lambda row: row.length, reverse=True)
    room = budget - len(rows[0].trajectory.prompt_tokens)
    lengths = [row.length for row in ordered]
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first `end` rows, and where their last run starts
    for end in range(1, len(ordered) + 1):
        starts = [start for start in range(end) if start == end - 1 or lengths[start] * (end - start) <= room]
        best.append(min((best[start][0] + lengths[start] * (end - start) + RUN_OVERHEAD, start) for start in starts))
    runs: list[list[TrainingSample]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        runs.insert(0, ordered[start:end])
        end = start
    return runs


def _parts(runs: list[list[TrainingSample]], budget: int) -> list[PromptBlock]:
    """Keep the runs of one group together while they and their prompt stay within the budget."""
    prompt = runs[0][0].trajectory.prompt_tokens
    parts = [PromptBlock(prompt=prompt, runs=[])]
    for run in runs:
        if parts[-1].runs and parts[-1].size + len(run) * run[0].length > budget:
            parts.append(PromptBlock(prompt=prompt, runs=[]))
        parts[-1].runs.append(run)
    return parts


def _fill(parts: list[PromptBlock], budget: int, streams: int) -> list[list[PromptBlock]]:
    """Put each part, largest first, into the pass that holds least; open as many more as there are lanes when full."""
    ordered = sorted(parts, key=lambda part: part.size, reverse=True)
    needed = -(-sum(part.size for part in parts) // budget)
    passes: list[list[PromptBlock]] = [[] for _ in range(-(-needed // streams) * streams)]
    sizes = [0] * len(passes)
    for part in ordered:
        place = min(range(len(passes)), key=lambda index: sizes[index])
        if sizes[place] and sizes[place] + part.size > budget:
            place = len(passes)
            passes += [[] for _ in range(streams)]
            sizes += [0] * streams
        passes[place].append(part)
        sizes[place] += part.size
    filled = [index for index in range(len(passes)) if passes[index]]
    return [passes[index] for index in sorted(filled, key=lambda index: sizes[index], reverse=True)]


def _pack(parts: list[PromptBlock]) -> MicroBatch:
    inputs: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    segments: list[Segment] = []
    start = 0
    for part in parts:
        more_inputs, more_sources, segment = _one_row(part) if part.is_one_row else _shared_prompt(part)
        inputs.append(more_inputs)
        sources.append(start + more_sources)
        segments.append(segment)
        start += len(more_inputs)
    rows = [row for part in parts for run in part.runs for row in run]
    return _micro_batch(rows, np.concatenate(inputs), tuple(segments), np.concatenate(sources))


def _shared_prompt(part: PromptBlock) -> tuple[np.ndarray, np.ndarray, Segment]:
    """Inputs of a prompt and its runs, and which of them predict the completion tokens."""
    inputs = [np.asarray(part.prompt, np.int32)]
    sources: list[np.ndarray] = []
    runs: list[tuple[int, int]] = []
    start = len(part.prompt)
    for run in part.runs:
        inputs_GT = _rectangle(run)
        length = inputs_GT.shape[1]
        inputs.append(inputs_GT.reshape(-1))
        for place, row in enumerate(run):
            first = start + place * length
            sources += [np.array([len(part.prompt) - 1]), np.arange(first, first + row.length)]
        start += inputs_GT.size
        if length:
            runs.append((len(run), length))
    return np.concatenate(inputs), np.concatenate(sources), Segment(prompt=len(part.prompt), runs=tuple(runs))


def _one_row(part: PromptBlock) -> tuple[np.ndarray, np.ndarray, Segment]:
    """Nobody shares the prompt: to attention the row is one sequence, which has the faster kernels."""
    inputs_T = _whole(part.runs[0][0])
    length = padded_length(len(inputs_T))
    padded_T = np.pad(inputs_T, (0, length - len(inputs_T)))
    return padded_T, np.arange(len(part.prompt) - 1, len(inputs_T)), Segment(prompt=length)


def _rectangle(run: list[TrainingSample]) -> np.ndarray:
    """Inputs of the rows, the first of which is the longest."""
    inputs_GT = np.zeros((len(run), padded_length(run[0].length)), np.int32)
    for place, row in enumerate(run):
        inputs_GT[place, : row.length] = row.trajectory.tokens[:-1]
    return inputs_GT


def _whole(row: TrainingSample) -> np.ndarray:
    return np.asarray((*row.trajectory.prompt_tokens, *row.trajectory.tokens[:-1]), np.int32)


def _plain_row(row: TrainingSample) -> MicroBatch:
    inputs_M = _whole(row)
    return _micro_batch([row], inputs_M, (), np.arange(len(row.trajectory.prompt_tokens) - 1, len(inputs_M)))


def _micro_batch(
    rows: list[TrainingSample], inputs_M: np.ndarray, segments: tuple[Segment, ...], sources_N: np.ndarray
) -> MicroBatch:
    lengths = [len(row.trajectory.tokens) for row in rows]
    masks = [np.asarray(row.trajectory.loss_mask, np.float32) * np.float32(row.weight) for row in rows]
    return MicroBatch(
        inputs_M=inputs_M,
        segments=segments,
        sources_N=sources_N.astype(np.int32),
        rows_N=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        completions_S=np.asarray([row.completion for row in rows], np.int32),
        tokens_N=np.concatenate([np.asarray(row.trajectory.tokens, np.int32) for row in rows]),
        behaviour_N=np.concatenate([np.asarray(row.trajectory.logprobs, np.float32) for row in rows]),
        advantages_N=np.concatenate([row.advantages() for row in rows]),
        weights_N=np.concatenate(masks),
        temperature_N=np.repeat(np.asarray([row.trajectory.temperature for row in rows], np.float32), lengths),
        versions_N=np.concatenate([_versions(row.trajectory) for row in rows]),
    )


def _versions(trajectory: Trajectory) -> np.ndarray:
    versions_T = np.full(len(trajectory.tokens), MIXED_VERSIONS, np.int32)
    for span in trajectory.weight_versions:
        if span.version != trajectory.weight_versions[0].version:
            break
        versions_T[span.start : span.end] = span.version
    return versions_T
