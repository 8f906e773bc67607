"""Given training data: demonstrations as lines of jsonl, and lines held out to evaluate on. `run` reads it.

A demonstration is {"prompt": "...", "completion": "..."} or {"messages": [{"role": ..., "content": ...}], "completion":
"..."}. A line with a `reward` (a sample of a run) counts from `learner.data_reward_min` on, and one with a
`finish_reason` only if it is `stop`.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from parallm.errors import ConfigError, ProblemError
from parallm.learner.loss.presets import resolve_objective
from parallm.learner.settings import LearnerSettings
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup

HELD_OUT = 10
"""One prompt in ten is held out, without a file of held-out lines."""
SAMPLES = "samples.jsonl"

logger = logging.getLogger(__name__)


class HasMessages(Protocol):
    @property
    def messages(self) -> Sequence[Message]: ...


Line = TypeVar("Line", bound=HasMessages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Generic[Line]):
    train: Sequence[Line]
    held_out: Sequence[Line]


def read_dataset(
    settings: LearnerSettings, read: Callable[[str, str], list[Line]], *, contents: str, holds_out: bool
) -> Dataset[Line]:
    """Read `learner.data` and the held-out lines, each with `read(path, key)`.

    `holds_out`: whether to hold lines out. Raises ConfigError for settings that contradict each other, ProblemError for
    data that cannot be used.
    """
    if settings.data is None:
        raise ConfigError(f"learner.data: must be given; name {contents}")
    if settings.data_held_out is not None and not holds_out:
        raise ConfigError(
            f"learner.data_held_out={settings.data_held_out}: trainer.evaluate_problems=0 turns evaluation off; set it "
            "above 0, or leave learner.data_held_out out"
        )
    lines = read(settings.data, "learner.data")
    if settings.data_held_out is not None:
        return Dataset(train=lines, held_out=read(settings.data_held_out, "learner.data_held_out"))
    return _split(lines, settings.data) if holds_out else Dataset(train=lines, held_out=())


def _split(lines: Sequence[Line], where: str) -> Dataset[Line]:
    train = [line for line in lines if not _is_held_out(line)]
    held_out = [line for line in lines if _is_held_out(line)]
    way_out = "name lines to evaluate on with learner.data_held_out, or set trainer.evaluate_problems=0"
    if not train:
        raise ProblemError(f"learner.data: all {len(lines)} lines of {where} are held out; {way_out}")
    if not held_out:
        logger.warning(
            "none of the %d lines of %s is held out, so nothing is evaluated; %s", len(lines), where, way_out
        )
    logger.info("%s: %d lines to train on, %d held out", where, len(train), len(held_out))
    return Dataset(train=train, held_out=held_out)


def _is_held_out(line: HasMessages) -> bool:
    """Depends on the prompt alone, so completions of one prompt are never on both sides."""
    text = repr([(message.role, message.content) for message in line.messages])
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0


def read_demonstrations(settings: LearnerSettings, *, holds_out: bool) -> Dataset[Problem] | None:
    """The demonstrations of a supervised run, whose `answer` is the completion; None for any other run.

    `holds_out`: keep some to evaluate on. Raises ConfigError if learner and data do not fit together, ProblemError for
    data that cannot be used.
    """
    if settings.trains == "reward_model":
        return None
    if resolve_objective(settings).policy != "likelihood":
        _refuse_data(settings)
        return None
    contents = "a jsonl file with lines of prompt and completion, or the folder of a run"
    read = partial(_read, settings.data_reward_min)
    return read_dataset(settings, read, contents=contents, holds_out=holds_out)


def to_group(demonstration: Problem, tokenizer: ChatTokenizer, max_context: int) -> TrajectoryGroup:
    """A demonstration as a group of one. Raises ProblemError if it is longer than the context."""
    prompt = tokenizer.encode_chat(demonstration.messages)
    tokens = tokenizer.encode_answer(demonstration.messages, demonstration.answer)
    if len(prompt) + len(tokens) > max_context:
        raise ProblemError(
            f"{demonstration.problem_id} has {len(prompt)} + {len(tokens)} tokens, the context of the model is "
            f"{max_context}; shorten it or leave it out"
        )
    trajectory = offline_trajectory(demonstration, prompt, tokens, demonstration.answer, reward=1.0)
    return TrajectoryGroup(problem=demonstration, trajectories=(trajectory,))


def offline_trajectory(
    problem: Problem, prompt: tuple[int, ...], tokens: tuple[int, ...], text: str, *, reward: float
) -> Trajectory:
    """A given completion as a trajectory, with no sampled log-probs."""
    return Trajectory(
        problem_id=problem.problem_id,
        prompt_tokens=prompt,
        tokens=tokens,
        loss_mask=(True,) * len(tokens),
        logprobs=(0.0,) * len(tokens),
        temperature=1.0,
        weight_versions=(),  # no version sampled it
        reward_parts={},
        reward=reward,
        text=text,
        finish_reason="stop",
    )


def _refuse_data(settings: LearnerSettings) -> None:
    """Raise ConfigError if data is named for a learner that samples its own."""
    for key in ("data", "data_held_out"):
        if (given := getattr(settings, key)) is not None:
            raise ConfigError(
                f"learner.{key}={given} is for learner=sft and learner=reward_model; learner={settings.preset} samples "
                "its own"
            )


def _read(reward_min: float, where: str, key: str) -> list[Problem]:
    path = Path(where).expanduser()
    if path.is_dir():
        path = path / SAMPLES
    rows = read_jsonl(path, key)
    accepted = [(number, row) for number, row in rows if _is_accepted(row, reward_min)]
    if not accepted:
        rewards = [row["reward"] for _, row in rows if isinstance(row.get("reward"), int | float)]
        raise ProblemError(
            f"{key}: none of the {len(rows)} lines of {path} counts; the largest reward is "
            f"{max(rewards, default=None)}, learner.data_reward_min={reward_min:g}"
        )
    logger.info("%s: %d of %d completions count", path, len(accepted), len(rows))
    return [_demonstration(path, f"{key}: line {number}", row) for number, row in accepted]


def read_jsonl(path: Path, key: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The objects of a jsonl file with their line numbers. Raises ProblemError; the setting `key` names the file."""
    try:
        lines = [line for line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1) if line[1].strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"{key}: {path} cannot be read: {error}") from error
    if not lines:
        raise ProblemError(f"{key}: {path} has no lines")
    return [(number, _row(line, f"{key}: line {number} of {path}")) for number, line in lines]


def messages_of(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """The messages of a line. Raises ProblemError; `where` names the line."""
    turns = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    try:
        messages = tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)
    except (TypeError, KeyError):
        messages = ()
    if not messages or not all(
        isinstance(message.content, str) and isinstance(message.role, str) for message in messages
    ):
        raise ProblemError(f"{where} has neither a text under prompt nor messages of role and content")
    return messages


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ProblemError(f"{where} is no object with a prompt")
    return row


def _is_accepted(row: Mapping[str, Any], reward_min: float) -> bool:
    if "reward" in row and not (isinstance(row["reward"], int | float) and row["reward"] >= reward_min):
        return False
    return bool(row.get("finish_reason", "stop") == "stop")


def _demonstration(path: Path, name: str, row: Mapping[str, Any]) -> Problem:
    """`name` does not depend on the file's folder, so a run can resume after the file moved."""
    where = f"{name} of {path}"
    completion = row.get("completion")
    if not isinstance(completion, str) or not completion:
        raise ProblemError(f"{where} has no text under completion; it has {sorted(row)}")
    return Problem(problem_id=name, messages=messages_of(row, where), answer=completion)
