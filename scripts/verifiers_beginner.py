"""Data for reverse-text, an environment of verifiers' authors, and a small model that can begin with it.

Texts are three or four digits. Demonstrations teach the form of an answer and not the task: two of three copy the text
between the tags as it stands, one reverses it. What is left to reinforcement learning is to find out which is rewarded.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from job import SCRIPTS, clean_environment, run_program

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
    command = [
        *(sys.executable, "-m", "parallm.train", "learner=sft", f"learner.data={demonstrations}", "name=taught"),
        *(f"model.path={made.model}", f"seed={seed}", "learner.learning_rate=1e-3", "learner.warmup_steps=5"),
        *("rollout.problems_per_step=16", f"trainer.steps={TAUGHT_STEPS}", "trainer.evaluate_problems=0"),
        *("server=off", "metrics.display=lines", f"hydra.run.dir={folder / 'taught'}"),
    ]
    run_program(command, clean_environment(), folder)
    return made


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
