"""Pairs of completions, one of them preferred: lines of jsonl -> training data of a reward model. `run` reads them.

A line is {"prompt": "...", "chosen": "...", "rejected": "..."}, or has `messages` in place of `prompt`. An optional
`margin` is the least difference of the two scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from parallm.errors import ConfigError, ProblemError
from parallm.learner.datasets import Dataset, messages_of, offline_trajectory, read_dataset, read_jsonl
from parallm.learner.loss.advantage import MAX_FLOAT32
from parallm.learner.loss.objective import Objective
from parallm.learner.settings import LearnerSettings
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import Message, Problem, ScoringRequest, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two completions of one prompt."""

    pair_id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float = 0.0


Pairs = Dataset[Pair]


def read_pairs(settings: LearnerSettings, *, holds_out: bool) -> Pairs | None:
    """The pairs of a run that trains a reward model; None for any other run.

    `holds_out`: keep some to evaluate on. Raises ConfigError for settings that contradict each other, ProblemError for
    data that cannot be used.
    """
    if settings.trains != "reward_model":
        return None
    if given := [field.name for field in fields(Objective) if getattr(settings, field.name) is not None]:
        raise ConfigError(f"learner.{given[0]} belongs to the objectives of policies; leave it out of a reward model's")
    contents = "a jsonl file with lines of prompt, chosen and rejected"
    return read_dataset(settings, _read, contents=contents, holds_out=holds_out)


def to_group(pair: Pair, tokenizer: ChatTokenizer, max_context: int) -> TrajectoryGroup:
    """A pair as a group of two, the chosen completion first, each with the token that ends it.

    Their rewards differ by the margin. Raises ProblemError if a completion is longer than the context, or if both have
    the same tokens.
    """
    prompt = tokenizer.encode_chat(pair.messages)
    chosen, rejected = (tokenizer.encode_answer(pair.messages, text) for text in (pair.chosen, pair.rejected))
    longest = max(len(chosen), len(rejected))
    if len(prompt) + longest > max_context:
        raise ProblemError(
            f"{pair.pair_id} has {len(prompt)} + {longest} tokens, the context of the model is {max_context}; shorten "
            "it or leave it out"
        )
    if chosen == rejected:
        raise ProblemError(f"{pair.pair_id}: chosen and rejected are the same {len(chosen)} tokens; leave the line out")
    problem = Problem(problem_id=pair.pair_id, messages=pair.messages, answer=pair.chosen)
    return TrajectoryGroup(
        problem=problem,
        trajectories=(
            offline_trajectory(problem, prompt, chosen, pair.chosen, reward=pair.margin),
            offline_trajectory(problem, prompt, rejected, pair.rejected, reward=0.0),
        ),
    )


def to_scoring_request(group: TrajectoryGroup) -> ScoringRequest:
    """The prompt and completions of a group, for a reward model."""
    return ScoringRequest(
        prompt_tokens=group.trajectories[0].prompt_tokens,
        completions=tuple(trajectory.tokens for trajectory in group.trajectories),
    )


def _read(where: str, key: str) -> list[Pair]:
    path = Path(where).expanduser()
    return [_pair(path, f"{key}: line {number}", row) for number, row in read_jsonl(path, key)]


def _pair(path: Path, name: str, row: Mapping[str, Any]) -> Pair:
    """`name` does not depend on the file's folder, so a run can resume after the file moved."""
    where = f"{name} of {path}"
    texts: dict[str, str] = {}
    for field in ("chosen", "rejected"):
        text = row.get(field)
        if not isinstance(text, str) or not text:
            raise ProblemError(f"{where} has no text under {field}; it has {sorted(row)}")
        texts[field] = text
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= MAX_FLOAT32:
        raise ProblemError(f"{where}: margin is {margin!r}, not a number that float32 can hold")
    return Pair(pair_id=name, messages=messages_of(row, where), margin=float(margin), **texts)
