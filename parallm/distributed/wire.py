"""Groups, episodes and figures as bytes: a JSON head and blocks of numbers, so that no bit is lost.

Nothing of what a peer sends is run: no pickle.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from parallm.array_row import ArrayRow, as_array
from parallm.errors import WorkersDiffer
from parallm.learner.faults import Blame
from parallm.learner.totals import Spread, UpdateTotals
from parallm.metrics.rollout_format import EncodedRow, EncodedRows, joined_arrays
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import Score, ScoredEpisode
from parallm.types import FaultyEpisode, GenerationRequest, Problem, Trajectory, TrajectoryGroup, WeightSpan

Blocks = Sequence[np.ndarray]
MAX_NAMED = 8
"""Problems that an error names."""


def pack(head: Any, blocks: Blocks = ()) -> bytes:
    """The bytes of a value of JSON types and arrays after it."""
    shapes = [(block.dtype.str, block.shape) for block in blocks]
    # as it is: escapes of other scripts take longer to read; `json.loads` lets halves of characters pass, too
    text = json.dumps({"head": head, "blocks": shapes}, ensure_ascii=False).encode(errors="surrogatepass")
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
        prompts = list(dict.fromkeys(trajectory.prompt_tokens for trajectory in group.trajectories))
        heads.append(
            {
                "problem_id": group.problem.problem_id,
                "solve_rate": group.solve_rate,
                "prompts": prompts,
                "trajectories": [_row(one, prompts.index(one.prompt_tokens)) for one in group.trajectories],
                "faulty": [asdict(episode) for episode in group.faulty],
            }
        )
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


_COLUMNS: Mapping[str, type] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float64,
    "token_advantages": np.float64,
}


def _rows(lengths: np.ndarray, values: np.ndarray) -> list[ArrayRow]:
    """The rows of a column."""
    return [ArrayRow(values[start:end]) for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


def _trajectories(head: dict[str, Any], columns: Iterator[Sequence[ArrayRow]]) -> tuple[Trajectory, ...]:
    """The trajectories of a group; takes as many of `columns`."""
    prompts = [tuple(prompt) for prompt in head["prompts"]]
    return tuple(_trajectory(row, prompts, next(columns)) for row in head["trajectories"])


def _row(trajectory: Trajectory, prompt: int) -> list[Any]:
    """A trajectory without its columns. `prompt`: index of its prompt."""
    return [
        prompt,
        trajectory.problem_id,
        trajectory.temperature,
        trajectory.reward,
        trajectory.text,
        trajectory.finish_reason,
        [(span.version, span.start, span.end) for span in trajectory.weight_versions],
        dict(trajectory.reward_parts),
        trajectory.token_advantages is not None,
    ]


def _trajectory(row: list[Any], prompts: Sequence[tuple[int, ...]], columns: Sequence[ArrayRow]) -> Trajectory:
    """The inverse of `_row`."""
    prompt, problem_id, temperature, reward, text, finish_reason, versions, reward_parts, has_advantages = row
    tokens, loss_mask, logprobs, token_advantages = columns
    return Trajectory(
        problem_id=problem_id,
        prompt_tokens=prompts[prompt],
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        temperature=temperature,
        weight_versions=tuple(WeightSpan(version=version, start=start, end=end) for version, start, end in versions),
        reward_parts=reward_parts,
        reward=reward,
        text=text,
        finish_reason=finish_reason,
        token_advantages=token_advantages if has_advantages else None,
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


def pack_rows(step: int, rows: EncodedRows | None) -> bytes:
    """The bytes of completions of a step, as its file holds them. None: this rank sends none of them."""
    if rows is None:
        return pack({"step": step})
    texts = "\n".join(row.text for row in rows.values())  # JSON escapes ends of lines
    lengths_S = np.fromiter((len(row.arrays["tokens"]) for row in rows.values()), np.int32, len(rows))
    arrays = joined_arrays(list(rows.values()))
    blocks: list[np.ndarray] = [np.frombuffer(texts.encode(), np.uint8), lengths_S, *arrays.values()]
    return pack({"step": step, "indices": list(rows), "arrays": list(arrays)}, blocks)


def unpack_rows(content: bytes) -> tuple[int, EncodedRows | None]:
    """The inverse of `pack_rows`."""
    head, blocks = unpack(content)
    if not blocks:
        return head["step"], None
    texts, lengths_S, *joined = blocks
    indices = [(group, index) for group, index in head["indices"]]
    bounds = pairwise([0, *np.cumsum(lengths_S).tolist()])
    arrays = (
        {name: array[begin:end] for name, array in zip(head["arrays"], joined, strict=True)} for begin, end in bounds
    )
    lines = texts.tobytes().decode().split("\n") if indices else []
    return head["step"], dict(zip(indices, map(EncodedRow, lines, arrays), strict=True))


SlotFigures = Mapping[int, tuple[UpdateTotals, Sequence[Blame]]]
"""Totals of the rounds of each slot of an update, and their values that are not finite."""


def pack_figures(figures: SlotFigures) -> bytes:
    return pack([(slot, asdict(totals), list(blames)) for slot, (totals, blames) in figures.items()])


def unpack_figures(content: bytes) -> SlotFigures:
    """The inverse of `pack_figures`."""
    return {slot: (_totals(totals), [Blame(*blame) for blame in blames]) for slot, totals, blames in unpack(content)[0]}


def _totals(values: dict[str, Any]) -> UpdateTotals:
    spreads = {name: Spread(**values[name]) for name in ("differences", "ratios")}
    return UpdateTotals(**(values | spreads))
