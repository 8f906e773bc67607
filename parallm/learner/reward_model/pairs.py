"""Pairs of completions, one of which is preferred: lines of jsonl -> what a reward model is trained on.

A line is {"prompt": "...", "chosen": "...", "rejected": "..."}, or has `messages` in place of `prompt`. A `margin`, if
there is one, is by how much the chosen completion's score should be higher at least.
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

    With `holds_out` some are left to evaluate on. Raises ConfigError where the settings do not go together,
    ProblemError for data that cannot be used.
    """
    if settings.trains != "reward_model":
        return None
    if given := [field.name for field in fields(Objective) if getattr(settings, field.name) is not None]:
        raise ConfigError(f"learner.{given[0]} belongs to the objectives of policies; leave it out of a reward model's")
    contents = "a jsonl file with lines of prompt, chosen and rejected"
    return read_dataset(settings, _read, contents=contents, holds_out=holds_out)


def to_group(pair: Pair, tokenizer: ChatTokenizer, max_context: int) -> TrajectoryGroup:
    """A pair as a group of two, the chosen completion first, each with the token that ends it.

    Their rewards differ by the margin. Raises ProblemError if a completion is longer than the context, or if both are
    the same to this tokenizer.
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


def to_prompted(group: TrajectoryGroup) -> ScoringRequest:
    """What a reward model scores of a group."""
    return ScoringRequest(
        prompt_tokens=group.trajectories[0].prompt_tokens,
        completions=tuple(one.tokens for one in group.trajectories),
    )


def _read(where: str, key: str) -> list[Pair]:
    path = Path(where).expanduser()
    return [_pair(path, f"{key}: line {number}", row) for number, row in read_jsonl(path, key)]


def _pair(path: Path, name: str, row: Mapping[str, Any]) -> Pair:
    """`name` stays the same where the file moves, so that a run can go on."""
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
