"""Groups, episodes and statistics as bytes: a JSON head and blocks of numbers, so that no bit is lost.

Nothing of what a peer sends is run: no pickle. Axes: N completion tokens of a micro-batch.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.array_row import ArrayRow, as_array
from parallm.errors import WorkersDiffer
from parallm.learner.passes.gradient import TokenStatistics
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import Score, ScoredEpisode
from parallm.types import FaultyEpisode, GenerationRequest, Problem, Trajectory, TrajectoryGroup, WeightSpan

Blocks = Sequence[np.ndarray]
MAX_NAMED = 8
"""Problems that an error names."""


def pack(head: Any, blocks: Blocks = ()) -> bytes:
    """The bytes of a value of JSON types and arrays after it."""
    shapes = [(block.dtype.str, block.shape) for block in blocks]
    text = json.dumps({"head": head, "blocks": shapes}).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *(np.ascontiguousarray(block).tobytes() for block in blocks)])


def unpack(content: bytes) -> tuple[Any, list[np.ndarray]]:
    """The inverse of `pack`."""
    start = 8 + int.from_bytes(content[:8], "big")
    values = json.loads(content[8:start])
    blocks = []
    for kind, shape in values["blocks"]:
        block = np.frombuffer(content, kind, math.prod(shape), start).reshape(shape)
        blocks.append(block)
        start += block.nbytes
    return values["head"], blocks


def pack_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """The bytes of groups with the ids of their problems, which all ranks know. Numbers are columns of all
    trajectories."""
    heads: list[dict[str, Any]] = []
    for group in groups:
        rows = []
        for trajectory in group.trajectories:
            row = {name: getattr(trajectory, name) for name in _PLAIN}
            row["weight_versions"] = [(span.version, span.start, span.end) for span in trajectory.weight_versions]
            row["reward_parts"] = dict(trajectory.reward_parts)
            row["has_advantages"] = trajectory.token_advantages is not None
            rows.append(row)
        faulty = [asdict(episode) for episode in group.faulty]
        prompts = list(dict.fromkeys(trajectory.prompt_tokens for trajectory in group.trajectories))
        for row, trajectory in zip(rows, group.trajectories, strict=True):
            row["prompt"] = prompts.index(trajectory.prompt_tokens)
        head = {"problem_id": group.problem.problem_id, "solve_rate": group.solve_rate, "prompts": prompts}
        heads.append(head | {"trajectories": rows, "faulty": faulty})
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    blocks: list[np.ndarray] = []
    for name, kind in _COLUMNS.items():
        rows_of = [getattr(trajectory, name) or () for trajectory in trajectories]
        lengths = np.fromiter(map(len, rows_of), np.int32, len(rows_of))
        blocks += [lengths, np.concatenate([np.zeros(0, kind), *(as_array(row, kind) for row in rows_of)])]
    return pack(heads, blocks)


def unpack_groups(content: bytes, problems: Sequence[Problem]) -> list[TrajectoryGroup]:
    """The groups of `problems`, in the same order. Raises WorkersDiffer if they are of others."""
    heads, blocks = unpack(content)
    sampled, drawn = [head["problem_id"] for head in heads], [problem.problem_id for problem in problems]
    if sampled != drawn:
        raise WorkersDiffer(f"problems {sampled[:MAX_NAMED]} were sampled and {drawn[:MAX_NAMED]} drawn")
    columns = [_rows(*pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    rows = zip(*columns, strict=True)
    return [
        TrajectoryGroup(
            problem=problem,
            trajectories=_trajectories(head, rows),
            faulty=tuple(_faulty(row) for row in head["faulty"]),
            solve_rate=head["solve_rate"],
        )
        for problem, head in zip(problems, heads, strict=True)
    ]


_PLAIN = ("problem_id", "temperature", "reward", "text", "finish_reason")
_COLUMNS: Mapping[str, type] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float64,
    "token_advantages": np.float64,
}


def _rows(lengths: np.ndarray, values: np.ndarray) -> list[ArrayRow]:
    """The rows of a column."""
    return [ArrayRow(values[start:end]) for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


def _trajectories(head: dict[str, Any], rows: Iterator[Sequence[ArrayRow]]) -> tuple[Trajectory, ...]:
    """The trajectories of a group; takes as many of `rows`."""
    prompts = [tuple(prompt) for prompt in head["prompts"]]
    return tuple(_trajectory(row, prompts[row["prompt"]], next(rows)) for row in head["trajectories"])


def _trajectory(row: dict[str, Any], prompt_tokens: tuple[int, ...], columns: Sequence[ArrayRow]) -> Trajectory:
    tokens, loss_mask, logprobs, token_advantages = columns
    return Trajectory(
        **{name: row[name] for name in _PLAIN},
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        token_advantages=token_advantages if row["has_advantages"] else None,
        weight_versions=tuple(
            WeightSpan(version=version, start=start, end=end) for version, start, end in row["weight_versions"]
        ),
        reward_parts=row["reward_parts"],
    )


def _faulty(row: dict[str, Any]) -> FaultyEpisode:
    return FaultyEpisode(**(row | {"tokens": tuple(row["tokens"])}))


def pack_episodes(groups: Sequence[Sequence[ScoredEpisode]]) -> bytes:
    """The bytes of scored episodes: what reports are made of."""
    return pack(
        [
            [
                {
                    "index": scored.episode.index,
                    "text": scored.episode.text,
                    "finish_reason": scored.episode.finish_reason,
                    "tokens": list(scored.episode.tokens),
                    "parts": dict(scored.score.parts),
                    "reward": scored.score.reward,
                    "fault": None if scored.score.fault is None else asdict(scored.score.fault),
                }
                for scored in group
            ]
            for group in groups
        ]
    )


def unpack_episodes(
    content: bytes, problems: Sequence[Problem], requests: Sequence[GenerationRequest]
) -> list[list[ScoredEpisode]]:
    """The episodes of `requests`, without log-probs, versions and turns."""
    groups, _ = unpack(content)
    return [
        [
            ScoredEpisode(
                episode=Episode(
                    problem=problem,
                    request=request,
                    index=row["index"],
                    tokens=row["tokens"],
                    text=row["text"],
                    finish_reason=row["finish_reason"],
                    is_over=True,
                ),
                score=Score(
                    parts=row["parts"],
                    reward=row["reward"],
                    fault=None if row["fault"] is None else _faulty(row["fault"]),
                ),
            )
            for row in group
        ]
        for problem, request, group in zip(problems, requests, groups, strict=True)
    ]


STATISTICS = ("loss", "logprobs_N", "entropies_N", "clipped_N", "kl_N", "kl_to_base_N")


def pack_rounds(rounds: Sequence[tuple[int, Sequence[TokenStatistics], float]]) -> bytes:
    """The bytes of rounds: index, statistics of each micro-batch, and norm of the gradient."""
    heads = [(index, len(statistics), norm) for index, statistics, norm in rounds]
    blocks = [np.array(getattr(one, name)) for _, many, _ in rounds for one in many for name in STATISTICS]
    return pack(heads, blocks)


def unpack_rounds(content: bytes) -> list[tuple[int, list[TokenStatistics], float]]:
    """The inverse of `pack_rounds`."""
    heads, blocks = unpack(content)
    arrays = iter(blocks)
    return [
        (index, [TokenStatistics(**{name: mx.array(next(arrays)) for name in STATISTICS}) for _ in range(count)], norm)
        for index, count, norm in heads
    ]
