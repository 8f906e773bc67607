"""Trajectory groups -> micro-batches, each the input of one forward and backward pass. `Learner` calls it.

A micro-batch packs whole completions of one or more groups into one flat sequence of tokens (`packing`): each prompt
once, then the inputs of its completions: rows of their own lengths where a layer attends to all in one launch, else
rectangles of similar lengths. Token ids are those that were sampled.
Axes: M computed tokens, N completion tokens in the order of the rows, S completions of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappush, heapreplace
from itertools import count
from typing import Any

import numpy as np

from parallm.array_row import as_array
from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.objective import Objective, token_weight
from parallm.learner.passes.packing import Segment, are_alike, padded_length
from parallm.types import Trajectory, TrajectoryGroup

MIXED_VERSIONS = -1
"""Stands for the version of tokens that several versions computed."""
RUN_OVERHEAD = 16  # cost of one more run, in computed tokens (measured on a CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one pass, for one update."""

    inputs_M: np.ndarray
    """int32. Runs are padded with zeros to rectangles."""
    segments: tuple[Segment, ...]
    """The layout of `inputs_M`; empty for a single unpacked prompt and completion."""
    sources_N: np.ndarray
    """Index of the hidden state that predicts each completion token, int32."""
    rows_N: np.ndarray
    """The row of each completion token, counted from 0 within the micro-batch, int32."""
    completions_S: np.ndarray
    """Index of each row among the step's completions, int32."""
    tokens_N: np.ndarray
    behaviour_N: np.ndarray
    """Log-probs that the engine sampled with, float32."""
    advantages_N: np.ndarray
    weights_N: np.ndarray
    temperature_N: np.ndarray
    versions_N: np.ndarray
    """The version that sampled a token and computed everything before it, int32; MIXED_VERSIONS after a switch."""
    base_N: np.ndarray | None = None
    """Log-probs of the base without an adapter, if the objective needs them (`scoring`)."""
    entropy_threshold: float | None = None
    """Tokens of lower entropy are not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory with its advantage and token weight."""

    trajectory: Trajectory
    completion: int
    """Index among the step's completions."""
    advantage: float
    """The reward's advantage; `Trajectory.token_advantages` override it."""
    weight: float
    """Weight of each trained token in the step's loss."""
    length: int
    """Tokens to compute after the prompt; the last one predicts nothing."""

    def advantages(self) -> np.ndarray:
        """Advantage of each completion token, float32."""
        own = self.trajectory.token_advantages
        return np.full(self.length + 1, self.advantage, np.float32) if own is None else as_array(own, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlock:
    """A prompt and runs of its completions, never cut further. A run is a rectangle of similar lengths."""

    prompt: tuple[int, ...]
    runs: list[list[TrainingSample]]

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1 and len(self.runs[0]) == 1

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(run) * run[0].length for run in self.runs)


class PlannedBatches(Sequence[MicroBatch]):
    """The micro-batches of a step, each built when it is first asked for: the device begins with the first, and workers
    begin with their own."""

    def __init__(self, plan: Sequence[Callable[[], MicroBatch]]) -> None:
        self._plan = plan
        self._built: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = range(len(self._plan))[index]
        if place not in self._built:
            self._built[place] = self._plan[place]()
        return self._built[place]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))  # `Sequence` would end at an IndexError of what builds one

    def replace(self, index: int, batch: MicroBatch) -> None:
        self._built[index] = batch


def make_micro_batches(
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    *,
    max_tokens: int,
    budget: int,
    streams: int = 1,
    packs: bool = True,
    takes_rows: bool = False,
) -> PlannedBatches:
    """Split the step into passes of at most `budget` tokens, padding included, largest first; one run always fits. None
    is built yet.

    Passes that run at the same time, one per stream, have similar sizes. Without `packs` every sample is its own pass.
    With `takes_rows` (`packing.takes_rows`) completions that are not long and equal are not padded to rectangles.
    """
    by_group = _samples(groups, objective, max_tokens)
    if not packs:
        samples = [sample for group in by_group for sample in group]
        largest_first = sorted(samples, key=lambda sample: sample.length, reverse=True)
        return PlannedBatches([partial(_unpacked, sample) for sample in largest_first])
    by_prompt = [samples for group in by_group for samples in _by_prompt(group)]
    apart = takes_rows and not are_alike([sample.length for samples in by_prompt for sample in samples])
    runs_of = [_rows(samples) if apart else _runs(samples, budget) for samples in by_prompt]
    blocks = [block for runs in runs_of for block in _blocks(runs, budget)]
    passes = make_passes([block.size for block in blocks], budget, streams)
    padded = (lambda length: length) if apart else padded_length
    return PlannedBatches([partial(_pack, [blocks[index] for index in indices], padded) for indices in passes])


def make_passes(sizes: Sequence[int], budget: int, streams: int) -> list[list[int]]:
    """Indices of items with `sizes` tokens, in passes of at most `budget` tokens or one item; largest passes first.

    Each item, largest first, goes to the emptiest pass; if that is full, one more pass per stream opens. So the number
    of passes is a multiple of `streams` if there are enough items, and passes have similar sizes.
    """
    needed = -(-sum(sizes) // budget)
    passes: list[list[int]] = []
    emptiest: list[tuple[int, int]] = []  # a heap of filled tokens and index of each pass

    def open_passes(count: int) -> None:
        for _ in range(count):
            heappush(emptiest, (0, len(passes)))
            passes.append([])

    open_passes(-(-needed // streams) * streams)
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        filled, index = emptiest[0]
        if filled and filled + sizes[item] > budget:
            open_passes(streams)
            filled, index = emptiest[0]
        passes[index].append(item)
        heapreplace(emptiest, (filled + sizes[item], index))
    return [passes[index] for filled, index in sorted(emptiest, key=lambda one: (-one[0], one[1])) if passes[index]]


def _samples(groups: Sequence[TrajectoryGroup], objective: Objective, max_tokens: int) -> list[list[TrainingSample]]:
    """The samples of each group with advantages and weights, without empty completions."""
    num_tokens_S = [trajectory.loss_mask.count(True) for group in groups for trajectory in group.trajectories]
    num_tokens = sum(num_tokens_S)
    advantages_S = advantages(objective.advantage, [group.rewards for group in groups], num_tokens_S)
    indices = count()

    def sample(trajectory: Trajectory) -> TrainingSample:
        index = next(indices)
        weight = token_weight(
            objective,
            length=num_tokens_S[index],
            num_tokens=num_tokens,
            num_completions=len(num_tokens_S),
            max_tokens=max_tokens,
        )
        return TrainingSample(
            trajectory=trajectory,
            completion=index,
            advantage=float(advantages_S[index]),
            weight=weight,
            length=len(trajectory.tokens) - 1,
        )

    by_group = [[sample(trajectory) for trajectory in group.trajectories] for group in groups]
    with_tokens = [[sample for sample in samples if sample.length >= 0] for samples in by_group]
    return [samples for samples in with_tokens if samples]


def _by_prompt(samples: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Samples of one group by prompt, in their order."""
    prompt = samples[0].trajectory.prompt_tokens
    if all(sample.trajectory.prompt_tokens is prompt for sample in samples):
        return [samples]
    by_prompt: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.trajectory.prompt_tokens, []).append(sample)
    return list(by_prompt.values())


def _rows(samples: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Each sample as a run of its own, the longest first."""
    return [[sample] for sample in sorted(samples, key=lambda sample: sample.length, reverse=True)]


def _runs(samples: list[TrainingSample], budget: int) -> list[list[TrainingSample]]:
    """Cut samples, longest first, into runs with the fewest padded tokens; a run of several stays in the budget.

    Dynamic programming over the last cut.
    """
    ordered = sorted(samples, key=lambda sample: sample.length, reverse=True)
    limit = budget - len(samples[0].trajectory.prompt_tokens)
    lengths = [sample.length for sample in ordered]
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first `end` samples, and the start of their last run
    for end in range(1, len(ordered) + 1):
        starts = [start for start in range(end) if start == end - 1 or lengths[start] * (end - start) <= limit]
        best.append(min((best[start][0] + lengths[start] * (end - start) + RUN_OVERHEAD, start) for start in starts))
    runs: list[list[TrainingSample]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        runs.insert(0, ordered[start:end])
        end = start
    return runs


def _blocks(runs: list[list[TrainingSample]], budget: int) -> list[PromptBlock]:
    """Group runs with their prompt into blocks within the budget."""
    prompt = runs[0][0].trajectory.prompt_tokens
    blocks = [PromptBlock(prompt=prompt, runs=[])]
    filled = len(prompt)
    for run in runs:
        size = len(run) * run[0].length
        if blocks[-1].runs and filled + size > budget:
            blocks.append(PromptBlock(prompt=prompt, runs=[]))
            filled = len(prompt)
        blocks[-1].runs.append(run)
        filled += size
    return blocks


def _pack(blocks: list[PromptBlock], padded: Callable[[int], int]) -> MicroBatch:
    """`padded` is what a length becomes."""
    inputs: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    segments: list[Segment] = []
    start = 0
    for block in blocks:
        more_inputs, more_sources, segment = (_single if block.is_single else _shared_prompt)(block, padded)
        inputs.append(more_inputs)
        sources.append(start + more_sources)
        segments.append(segment)
        start += len(more_inputs)
    samples = [sample for block in blocks for run in block.runs for sample in run]
    return _micro_batch(samples, np.concatenate(inputs), tuple(segments), np.concatenate(sources))


def _shared_prompt(block: PromptBlock, padded: Callable[[int], int]) -> tuple[np.ndarray, np.ndarray, Segment]:
    """Inputs of a prompt and its runs, and the indices that predict completion tokens."""
    inputs = [np.asarray(block.prompt, np.int32)]
    sources: list[np.ndarray] = []
    runs: list[tuple[int, int]] = []
    start = len(block.prompt)
    for run in block.runs:
        inputs_GT = _rectangle(run, padded(run[0].length))
        length = inputs_GT.shape[1]
        inputs.append(inputs_GT.reshape(-1))
        for index, sample in enumerate(run):
            first = start + index * length
            sources += [np.array([len(block.prompt) - 1]), np.arange(first, first + sample.length)]
        start += inputs_GT.size
        if length:
            runs.append((len(run), length))
    return np.concatenate(inputs), np.concatenate(sources), Segment(prompt=len(block.prompt), runs=tuple(runs))


def _single(block: PromptBlock, padded: Callable[[int], int]) -> tuple[np.ndarray, np.ndarray, Segment]:
    """An unshared prompt: attention sees prompt and completion as one sequence, which has faster kernels."""
    inputs_T = _whole(block.runs[0][0])
    length = padded(len(inputs_T))
    padded_T = np.zeros(length, np.int32)
    padded_T[: len(inputs_T)] = inputs_T
    return padded_T, np.arange(len(block.prompt) - 1, len(inputs_T)), Segment(prompt=length)


def _rectangle(run: list[TrainingSample], length: int) -> np.ndarray:
    """Inputs of a run, padded to `length`."""
    inputs_GT = np.zeros((len(run), length), np.int32)
    for index, sample in enumerate(run):
        inputs_GT[index, : sample.length] = as_array(sample.trajectory.tokens[:-1], np.int32)
    return inputs_GT


def _whole(sample: TrainingSample) -> np.ndarray:
    prompt, tokens = sample.trajectory.prompt_tokens, sample.trajectory.tokens[:-1]
    return np.concatenate([as_array(prompt, np.int32), as_array(tokens, np.int32)])


def _unpacked(sample: TrainingSample) -> MicroBatch:
    inputs_M = _whole(sample)
    return _micro_batch([sample], inputs_M, (), np.arange(len(sample.trajectory.prompt_tokens) - 1, len(inputs_M)))


def _micro_batch(
    samples: list[TrainingSample], inputs_M: np.ndarray, segments: tuple[Segment, ...], sources_N: np.ndarray
) -> MicroBatch:
    lengths = [len(sample.trajectory.tokens) for sample in samples]
    masks_N = _joined([sample.trajectory.loss_mask for sample in samples], np.float32)
    return MicroBatch(
        inputs_M=inputs_M,
        segments=segments,
        sources_N=sources_N.astype(np.int32),
        rows_N=np.repeat(np.arange(len(samples), dtype=np.int32), lengths),
        completions_S=np.asarray([sample.completion for sample in samples], np.int32),
        tokens_N=_joined([sample.trajectory.tokens for sample in samples], np.int32),
        behaviour_N=_joined([sample.trajectory.logprobs for sample in samples], np.float32),
        advantages_N=np.concatenate([sample.advantages() for sample in samples]),
        weights_N=masks_N * np.repeat(np.asarray([sample.weight for sample in samples], np.float32), lengths),
        temperature_N=np.repeat(np.asarray([sample.trajectory.temperature for sample in samples], np.float32), lengths),
        versions_N=np.concatenate([_versions(sample.trajectory) for sample in samples]),
    )


def _joined(rows: Sequence[Sequence[float]], kind: type) -> np.ndarray:
    """The numbers of all rows, one row after the other."""
    return np.concatenate([as_array(row, kind) for row in rows])


def _versions(trajectory: Trajectory) -> np.ndarray:
    versions_T = np.full(len(trajectory.tokens), MIXED_VERSIONS, np.int32)
    for span in trajectory.weight_versions:
        if span.version != trajectory.weight_versions[0].version:
            break
        versions_T[span.start : span.end] = span.version
    return versions_T
