"""Given training data: lines of jsonl as examples to imitate or to compare, and lines held out to evaluate on.

A demonstration is {"prompt": "...", "completion": "..."}; a line with a `reward` (a sample of a run) counts from
`learner.data_reward_min` on, and one with a `finish_reason` only if it is `stop`. Samples with replies of an
environment, or without a known prompt, are left out. A pair is {"prompt": "...", "chosen":
"...", "rejected": "..."}; an optional `margin` is the least difference of the two scores. Any line may have `messages`,
[{"role": ..., "content": ...}], in place of `prompt`.

Texts have the names of sentence-transformers: {"anchor": "...", "positive": "..."} with `negative`, `negative_1` to
`negative_n`, a list of `negatives`, or none; {"text": "...", "label": "name"} for one label of several, {"text": "...",
"label": 1} for a target from 0 to 1, {"text": "...", "labels": ["name", ...]} for any number of labels. Other fields of
texts are refused.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallm.errors import ConfigError, ProblemError
from parallm.learner.loss.advantage import MAX_FLOAT32
from parallm.learner.loss.objective import resolve_objective
from parallm.learner.settings import LearnerSettings
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup

HELD_OUT = 10
"""One prompt in ten is held out, without a file of held-out lines."""
SAMPLES = "samples.jsonl"
NUM_TOKENS, NUM_TRAINED_TOKENS = "num_tokens", "num_trained_tokens"
"""Fields of a sample: tokens of the completion, and those of them that the run learned from."""
NEGATIVE = re.compile(r"negative(_[1-9][0-9]*)?")
TARGET = "score"
"""Label of texts that have a number in place of names."""
CONTENTS = {
    "policy": "a jsonl file with lines of prompt and completion, or the folder of a run",
    "reward_model": "a jsonl file with lines of prompt, chosen and rejected",
    "embedding": "a jsonl file with lines of anchor and positive",
    "classifier": "a jsonl file with lines of text and label",
}
Row = Mapping[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt with a completion to imitate, or with two: the chosen and the rejected one.

    Or an anchor with its document and wrong ones, or a text with the names of its labels.
    """

    example_id: str
    """Does not depend on the file's folder, so a run can resume after the file moved."""
    messages: tuple[Message, ...]
    completions: tuple[str, ...]
    rewards: tuple[float, ...]
    """1 for a demonstration; those of a pair differ by its margin; targets of labels."""
    is_multi_label: bool = False
    """Whether a text has any number of labels."""
    is_score: bool = False
    """Whether a text has a number in place of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    train: Sequence[Example]
    held_out: Sequence[Example]


def read_dataset(settings: LearnerSettings, *, holds_out: bool) -> Dataset | None:
    """The examples of a run that is given some; None for a run that samples its own.

    `holds_out`: keep some to evaluate on. Raises ConfigError for settings that contradict each other, ProblemError for
    data that cannot be used.
    """
    objective = resolve_objective(settings)
    if settings.trains == "policy" and objective.policy != "likelihood":
        for key in ("data", "data_held_out"):
            if (given := getattr(settings, key)) is not None:
                raise ConfigError(
                    f"learner.{key}={given} is for learner=sft, reward_model, embedding and classifier; "
                    f"learner={settings.preset} samples its own"
                )
        return None
    if settings.data is None:
        raise ConfigError(f"learner.data: must be given; name {CONTENTS[settings.trains]}")
    if settings.data_held_out is not None and not holds_out:
        raise ConfigError(
            f"learner.data_held_out={settings.data_held_out}: trainer.evaluate_problems=0 turns evaluation off; set it "
            "above 0, or leave learner.data_held_out out"
        )
    examples = _read(settings, settings.data, "learner.data")
    if settings.data_held_out is not None:
        return Dataset(train=examples, held_out=_read(settings, settings.data_held_out, "learner.data_held_out"))
    return _split(examples, settings.data) if holds_out else Dataset(train=examples, held_out=())


def to_group(example: Example, tokenizer: ChatTokenizer, max_context: int) -> TrajectoryGroup:
    """An example as trajectories without sampled log-probs, each with the token that ends it.

    Raises ProblemError if a completion is longer than the context, or if those of a pair have the same tokens.
    """
    prompt = tokenizer.encode_chat(example.messages)
    completions = [tokenizer.encode_answer(example.messages, text) for text in example.completions]
    longest = max(map(len, completions))
    if len(prompt) + longest > max_context:
        raise ProblemError(
            f"{example.example_id} has {len(prompt)} + {longest} tokens, the context of the model is {max_context}; "
            "shorten it or leave it out"
        )
    if len(set(completions)) < len(completions):
        raise ProblemError(
            f"{example.example_id}: chosen and rejected are the same {longest} tokens; leave the line out"
        )
    trajectories = tuple(
        Trajectory(
            problem_id=example.example_id,
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
        for tokens, text, reward in zip(completions, example.completions, example.rewards, strict=True)
    )
    problem = Problem(problem_id=example.example_id, messages=example.messages, answer=example.completions[0])
    return TrajectoryGroup(problem=problem, trajectories=trajectories)


def _split(examples: Sequence[Example], where: str) -> Dataset:
    train = [example for example in examples if not _is_held_out(example)]
    held_out = [example for example in examples if _is_held_out(example)]
    way_out = "name lines to evaluate on with learner.data_held_out, or set trainer.evaluate_problems=0"
    if not train:
        raise ProblemError(f"learner.data: all {len(examples)} lines of {where} are held out; {way_out}")
    if not held_out:
        logger.warning(
            "none of the %d lines of %s is held out, so nothing is evaluated; %s", len(examples), where, way_out
        )
    logger.info("%s: %d lines to train on, %d held out", where, len(train), len(held_out))
    return Dataset(train=train, held_out=held_out)


def _is_held_out(example: Example) -> bool:
    """Depends on the prompt alone, so completions of one prompt are never on both sides."""
    text = repr([(message.role, message.content) for message in example.messages])
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0


def _read(settings: LearnerSettings, where: str, key: str) -> list[Example]:
    path, trains = Path(where).expanduser(), settings.trains
    if path.is_dir() and trains == "policy":
        path = path / SAMPLES
    rows = _read_rows(path, key)
    if trains == "policy":
        rows = _accepted(rows, settings.data_reward_min, path, key)
    if trains == "embedding":
        return [_document_example(row, f"{key}: line {number}", path) for number, row in rows]
    if trains == "classifier":
        return [_labeled_example(row, f"{key}: line {number}", path) for number, row in rows]
    return [_example(row, f"{key}: line {number}", path, is_pairs=trains == "reward_model") for number, row in rows]


def _read_rows(path: Path, key: str) -> list[tuple[int, Row]]:
    """The objects of a jsonl file with their line numbers."""
    try:
        lines = [line for line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1) if line[1].strip()]
    except (OSError, UnicodeDecodeError) as error:
        if path.name == SAMPLES and not path.exists():
            reason = f"{path.parent} has no {SAMPLES}; name a run that has sampled completions, or a jsonl file"
            raise ProblemError(f"{key}: {reason}") from error
        raise ProblemError(f"{key}: {path} cannot be read: {error}") from error
    if not lines:
        raise ProblemError(f"{key}: {path} has no lines")
    return [(number, _row(line, f"{key}: line {number} of {path}")) for number, line in lines]


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ProblemError(f"{where} is no object with a prompt")
    return row


def _accepted(rows: list[tuple[int, Row]], reward_min: float, path: Path, key: str) -> list[tuple[int, Row]]:
    accepted = [(number, row) for number, row in rows if _is_accepted(row, reward_min)]
    if not accepted:
        rewards = [row["reward"] for _, row in rows if isinstance(row.get("reward"), int | float)]
        raise ProblemError(
            f"{key}: none of the {len(rows)} lines of {path} counts; the largest reward is "
            f"{max(rewards, default=None)}, learner.data_reward_min={reward_min:g}"
        )
    logger.info("%s: %d of %d completions count", path, len(accepted), len(rows))
    return _imitable(accepted, path, key)


def _imitable(rows: list[tuple[int, Row]], path: Path, key: str) -> list[tuple[int, Row]]:
    """The rows without samples whose completion is not an answer of the policy to a known prompt."""
    flaws = Counter(flaw for _, row in rows if (flaw := _flaw(row)) is not None)
    for flaw, count in flaws.items():
        logger.warning("%s: %d of %d samples are left out, since %s", path, count, len(rows), flaw)
    if flaws.total() == len(rows):
        raise ProblemError(f"{key}: all {len(rows)} samples of {path} are left out, since {'; '.join(flaws)}")
    imitable = [(number, row) for number, row in rows if _flaw(row) is None]
    num_old = sum(NUM_TOKENS in row and NUM_TRAINED_TOKENS not in row for _, row in imitable)
    if num_old:
        logger.warning(
            "%s: %d of %d samples are of an older version, which kept no roles: a system message counts as the user's, "
            "and an environment's replies count as the policy's words; sample again if the run has either",
            path,
            num_old,
            len(rows),
        )
    return imitable


def _flaw(row: Row) -> str | None:
    """Why a sample of a run cannot be imitated; None if it can, or if the line is no sample."""
    if NUM_TRAINED_TOKENS not in row:
        return None
    if row[NUM_TRAINED_TOKENS] != row.get(NUM_TOKENS):
        return "they hold tokens that the policy did not write, such as an environment's replies"
    return None if row.get("messages") else "their prompts are not known as messages"


def _is_accepted(row: Row, reward_min: float) -> bool:
    if "reward" in row and not (isinstance(row["reward"], int | float) and row["reward"] >= reward_min):
        return False
    return bool(row.get("finish_reason", "stop") == "stop")


def _example(row: Row, name: str, path: Path, *, is_pairs: bool) -> Example:
    where = f"{name} of {path}"
    fields = ("chosen", "rejected") if is_pairs else ("completion",)
    for field in fields:
        if not isinstance(row.get(field), str) or not row[field]:
            raise ProblemError(f"{where} has no text under {field}; it has {sorted(row)}")
    margin = row.get("margin", 0.0) if is_pairs else 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= MAX_FLOAT32:
        raise ProblemError(f"{where}: margin is {margin!r}, not a number that float32 can hold")
    return Example(
        example_id=name,
        messages=_messages(row, where),
        completions=tuple(row[field] for field in fields),
        rewards=(float(margin), 0.0) if is_pairs else (1.0,),
    )


def _document_example(row: Row, name: str, path: Path) -> Example:
    numbered = sorted((field for field in row if NEGATIVE.fullmatch(field)), key=lambda field: (len(field), field))
    _check_fields(row, {"anchor", "positive", *(numbered or ["negatives"])}, f"{name} of {path}")
    negatives = row.get("negatives", [row[field] for field in numbered])
    texts = [row.get("anchor"), row.get("positive"), *(negatives if isinstance(negatives, list) else [None])]
    if not all(isinstance(text, str) and text for text in texts):
        raise ProblemError(
            f"{name} of {path} should have a text under anchor and positive, and texts under negative, negative_1 to "
            f"negative_n, or negatives if there are any; it has {sorted(row)}"
        )
    return Example(
        example_id=name,
        messages=(Message(role="user", content=str(texts[0])),),
        completions=tuple(str(text) for text in texts[1:]),
        rewards=(1.0,) + (0.0,) * len(negatives),
    )


def _labeled_example(row: Row, name: str, path: Path) -> Example:
    text, is_multi_label, target = row.get("text"), "labels" in row, 1.0
    _check_fields(row, {"text", "labels" if is_multi_label else "label"}, f"{name} of {path}")
    labels: Any = row["labels"] if is_multi_label else [row.get("label")]
    if not isinstance(text, str) or not text or not isinstance(labels, list):
        raise ProblemError(f"{name} of {path} should have a text under text, and label or labels; it has {sorted(row)}")
    is_score = not is_multi_label and isinstance(labels[0], int | float) and 0 <= labels[0] <= 1
    if is_score:
        labels, target = [TARGET], float(labels[0])
    if not all(isinstance(label, str) and label for label in labels) or len(set(labels)) < len(labels):
        raise ProblemError(
            f"{name} of {path}: the label is {str(labels)[:100]}, and labels are names, each once, or a number from 0 "
            "to 1; write the names of numbered labels"
        )
    return Example(
        example_id=name,
        messages=(Message(role="user", content=text),),
        completions=tuple(labels),
        rewards=(target,) * len(labels),
        is_multi_label=is_multi_label,
        is_score=is_score,
    )


def _check_fields(row: Row, known: set[str], where: str) -> None:
    if unknown := sorted(row.keys() - known):
        raise ProblemError(
            f"{where} has a field {unknown[0][:100]!r}, which is not read beside {', '.join(sorted(known))}; leave it "
            "out of the file, or rename it"
        )


def _messages(row: Row, where: str) -> tuple[Message, ...]:
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
