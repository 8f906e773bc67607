"""Models that can begin with an environment of verifiers, and data for reverse-text of its authors.

The embedded model has never met a second question in one conversation. It is shown some with its own answers to single
questions, right or wrong: how to answer a second one, and not how to calculate.

For reverse-text, texts are three or four digits. Demonstrations teach the form of an answer and not the task: two of
three copy the text between the tags as it stands, one reverses it. What is left to reinforcement learning is to find
out which is rewarded.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from job import SCRIPTS, clean_environment, run_program

from parallm.metrics.json_lines import read_rows

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
"""What the environment tells the model, which demonstrations have to repeat."""
NUM_TEXTS, NUM_DEMONSTRATIONS = 320, 2560
TAUGHT_STEPS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginner:
    """A model that knows the form of an answer."""

    model: Path
    adapter: Path
    data: Path
    """A folder that the environment takes for its data set."""


def beginner(model: str, folder: Path, seed: int = 0) -> Beginner:
    """Teach a copy of `model` the form, in a minute or two. Raises RuntimeError with the last words of what fails."""
    made = Beginner(model=folder / "model", adapter=folder / "taught" / "adapter", data=folder / "texts")
    texts = digits(NUM_TEXTS + NUM_DEMONSTRATIONS, seed)
    made.data.mkdir(parents=True)
    write_rows(made.data / "train.jsonl", [{"prompt": text} for text in texts[:NUM_TEXTS]])
    demonstrations = folder / "demonstrations.jsonl"
    write_rows(demonstrations, [shown(text, place) for place, text in enumerate(texts[NUM_TEXTS:])])
    worker = str(SCRIPTS / "workers" / "tell_apart.py")
    run_program([sys.executable, worker, model, str(made.model), wrapped("0123456789")], clean_environment())
    start = (f"model.path={made.model}", "learner.learning_rate=1e-3", "rollout.problems_per_step=16")
    teach(demonstrations, folder, [*start, f"trainer.steps={TAUGHT_STEPS}"], seed)
    return made


def used_to_second_questions(folder: Path, seed: int) -> Path:
    """The embedded model's adapter after that. Raises RuntimeError with the last words of what fails."""
    folder.mkdir(parents=True)
    own, demonstrations = folder / "own", folder / "demonstrations.jsonl"
    settings = ["environment=arithmetic", "learner.learning_rate=0", "trainer.steps=8", "metrics.samples_per_step=256"]
    sizes = ["rollout.problems_per_step=128", "rollout.group_size=2", "rollout.max_tokens=64", "model=nano"]
    train([*settings, *sizes, f"hydra.run.dir={own}"], folder, seed)
    whole = [row for row in read_rows(own / "samples.jsonl") if row["finish_reason"] == "stop"]
    pairs = [(first, second) for first, second in pairwise(whole) if first["problem_id"] != second["problem_id"]]
    write_rows(demonstrations, [in_turn(first, second) for first, second in pairs[::2]])
    rest = ["learner.learning_rate=3e-3", "rollout.problems_per_step=32", "trainer.steps=100", "model=nano"]
    return teach(demonstrations, folder, rest, seed)


def in_turn(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, object]:
    messages = [
        {"role": "user", "content": first["prompt"]},
        {"role": "assistant", "content": first["completion"]},
        {"role": "user", "content": second["prompt"]},
    ]
    return {"messages": messages, "completion": second["completion"]}


def teach(demonstrations: Path, folder: Path, settings: Sequence[str], seed: int) -> Path:
    """The adapter of a model that imitates `demonstrations`, in `folder`."""
    run = folder / "taught"
    data = ["learner=sft", f"learner.data={demonstrations}", "learner.warmup_steps=5"]
    train([*data, *settings, f"hydra.run.dir={run}"], folder, seed)
    return run / "adapter"


def train(settings: Sequence[str], folder: Path, seed: int) -> None:
    rest = [f"seed={seed}", "name=beginner", "trainer.evaluate_problems=0", "server=off", "metrics.display=lines"]
    run_program([sys.executable, "-m", "parallm.train", *settings, *rest], clean_environment(), folder)


def digits(count: int, seed: int) -> list[str]:
    """Different texts that are not their own reversal."""
    chance = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = "".join(chance.choice("0123456789") for _ in range(chance.choice((3, 4))))
        if text != text[::-1]:
            texts[text] = None
    return list(texts)


def shown(text: str, place: int) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"messages": messages, "completion": wrapped(text[::-1] if place % 3 == 0 else text)}


def wrapped(text: str) -> str:
    return f"<reversed_text>{text}</reversed_text>"


def write_rows(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
