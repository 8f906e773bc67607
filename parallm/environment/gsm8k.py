"""GSM8K: grade-school problems whose answer ends with `#### N`, from the Hugging Face hub or from local jsonl."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from parallm.environment.math_answer import has_final_form, last_number, marked_number, parse_number
from parallm.environment.settings import Gsm8kSettings
from parallm.errors import ProblemError
from parallm.types import Message, Problem, Split

LOCAL_HINT = (
    "for local files set environment.path=FOLDER with train.jsonl and test.jsonl, or environment.path=FILE.jsonl"
)


Row: TypeAlias = tuple[str, Any]
"""The origin of a dataset's row, for error messages, and its values."""


class Gsm8k:
    """Reward parts: `correct` (the number read from the text equals the answer) and `format` (ends with `#### N`).

    One jsonl file is the train split and has no test split: to hold problems back silently, or to test on problems of
    the training, would mislead.
    """

    def __init__(self, settings: Gsm8kSettings) -> None:
        self._settings = settings
        self._problems: dict[Split, tuple[Problem, ...]] = {}
        self.weights: Mapping[str, float] = {"correct": 1.0, "format": settings.format_weight}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Read `split` on first use. `limit` shortens the train split only. Raises ProblemError with file and line."""
        if split not in self._problems:
            limit = self._settings.limit if split == "train" else None
            rows = list(rows_of(self._settings.path, split))[:limit]
            if not rows:
                raise ProblemError(f"environment.path={self._settings.path}: the {split} split is empty")
            self._problems[split] = tuple(to_problem(row, f"gsm8k/{split}/{i}") for i, row in enumerate(rows))
        return self._problems[split]

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        number = marked_number(text)
        if number is None and self._settings.reading == "lenient":
            number = last_number(text)
        correct = number is not None and number == parse_number(problem.answer)
        return {"correct": float(correct), "format": float(has_final_form(text))}


def to_problem(row: Row, problem_id: str) -> Problem:
    """Convert a row. Raises ProblemError if it lacks a question or a final `#### N`."""
    source, values = row
    if not isinstance(values, Mapping):
        raise ProblemError(f'{source}: expected an object {{"question": ..., "answer": ...}}, found {values!r:.60}')
    question, answer = (_text(row, key) for key in ("question", "answer"))
    number = marked_number(answer)
    if number is None:
        raise ProblemError(f"{source}: the answer must end with `#### NUMBER`, found {answer[-60:]!r}")
    return Problem(problem_id=problem_id, messages=(Message(role="user", content=question),), answer=f"{number:f}")


def _text(row: Row, key: str) -> str:
    source, values = row
    text = values.get(key)
    if not isinstance(text, str) or not text.strip():
        raise ProblemError(f"{source}: no text under the key `{key}`; its keys are {sorted(values)}")
    return text


def rows_of(path: str, split: Split) -> Iterator[Row]:
    """Yield the rows of `split`: from local files if `path` exists or looks like a path, else from the hub."""
    local = Path(path).expanduser()
    if local.is_dir():
        file = local / f"{split}.jsonl"
        if not file.is_file():
            raise ProblemError(f"environment.path={path} has no {file.name}; {LOCAL_HINT}")
        return read_jsonl(file)
    if local.is_file():
        if split == "test":
            raise ProblemError(
                f"environment.path={path} is one file, which is the train split; for held-out problems give a folder "
                "with train.jsonl and test.jsonl, or turn evaluation off with trainer.evaluate_problems=0"
            )
        return read_jsonl(local)
    if path.startswith((".", "/", "~")) or path.endswith(".jsonl") or path.count("/") > 1:
        raise ProblemError(f"environment.path={path}: no such folder or file ({local.absolute()}); {LOCAL_HINT}")
    return read_hub(path, split)


def read_jsonl(file: Path) -> Iterator[Row]:
    """Yield one row per line, without empty lines. Raises ProblemError with file and line."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}, line {number}", json.loads(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{file}, line {number}: not JSON: {error}") from error


def read_hub(name: str, split: Split) -> Iterator[Row]:
    """Yield the rows of a hub dataset, from its local cache if it was downloaded before."""
    import datasets  # noqa: PLC0415 - takes seconds to import, and local files do not need it

    try:
        # the configuration names the original GSM8K; other datasets have one configuration without a name
        rows = datasets.load_dataset(name, "main" if name.endswith("/gsm8k") else None, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ProblemError(
            f"environment.path={name} could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); {LOCAL_HINT}"
        ) from error
    for number, values in enumerate(rows, start=1):
        yield f"{name}, {split} row {number}", values
