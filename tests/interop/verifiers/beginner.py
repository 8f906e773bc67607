"""Models that can begin with an environment of verifiers, and data for reverse-text of its authors.

The embedded model has never met a second question in one conversation. It is shown some with its own answers to single
questions, right or wrong: how to answer a second one, and not how to calculate.

For reverse-text, texts are three or four digits. Demonstrations teach the form of an answer and not the task: two of
three copy the text between the tags as it stands, one reverses it. What is left to reinforcement learning is to find
out which is rewarded. A character of the tags that the model's training never met gets an embedding of its own: tokens
that were never met end up with one and the same, and LoRA, which leaves embeddings alone, cannot tell them apart.
"""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench.processes import train
from tokenizers import Tokenizer

from parallm.metrics.json_lines import read_rows

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
"""The environment's own words, which demonstrations have to repeat."""
NUM_TEXTS, NUM_DEMONSTRATIONS = 320, 2560
TABLES = ("embed_tokens.weight", "lm_head.weight")
TWINS = 0.98
"""Cosine from which two tokens' embeddings count as the same one."""

# V vocabulary, H hidden size, T tokens of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginner:
    """A model that knows the form of an answer."""

    model: Path
    adapter: Path
    data: Path
    """A folder that the environment takes for its data set."""


def beginner(model: str, folder: Path) -> Beginner:
    """Teach a copy of `model` the form, in a minute or two. Raises RuntimeError if training fails."""
    made = Beginner(model=folder / "model", adapter=folder / "taught" / "adapter", data=folder / "texts")
    texts = digits(NUM_TEXTS + NUM_DEMONSTRATIONS)
    made.data.mkdir(parents=True)
    write_rows(made.data / "train.jsonl", [{"prompt": text} for text in texts[:NUM_TEXTS]])
    copy_with_embeddings(Path(model), made.model, wrapped("0123456789"))
    settings = (f"model.path={made.model}", "learner.learning_rate=1e-3", "rollout.problems_per_step=16")
    teach(folder, texts_and_reversals(texts[NUM_TEXTS:]), *settings, "trainer.steps=160")
    return made


def used_to_second_questions(folder: Path) -> Path:
    """The adapter of the embedded model after that. Raises RuntimeError if training fails."""
    own = folder / "own"
    train(
        own,
        *("environment=arithmetic", "learner.learning_rate=0", "trainer.steps=8", "metrics.samples_per_step=256"),
        *("rollout.problems_per_step=128", "rollout.group_size=2", "rollout.max_tokens=64", "model=nano"),
        "trainer.evaluate_problems=0",
    )
    whole = [row for row in read_rows(own / "samples.jsonl") if row["finish_reason"] == "stop"]
    pairs = [(first, second) for first, second in pairwise(whole) if first["problem_id"] != second["problem_id"]]
    rows = [
        {"messages": turns(first["prompt"], first["completion"], second["prompt"]), "completion": second["completion"]}
        for first, second in pairs[::2]
    ]
    settings = ("learner.learning_rate=3e-3", "rollout.problems_per_step=32", "trainer.steps=100", "model=nano")
    return teach(folder, rows, *settings)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def teach(folder: Path, demonstrations: Sequence[dict[str, Any]], *settings: str) -> Path:
    """The adapter of a model that imitates the demonstrations."""
    file, run = folder / "demonstrations.jsonl", folder / "taught"
    write_rows(file, demonstrations)
    data = ("learner=sft", f"learner.data={file}", "learner.warmup_steps=5", "trainer.evaluate_problems=0")
    train(run, *data, *settings)
    return run / "adapter"


def digits(count: int) -> list[str]:
    """Different texts that are not their own reversal."""
    chance = random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = "".join(chance.choice("0123456789") for _ in range(chance.choice((3, 4))))
        if text != text[::-1]:
            texts[text] = None
    return list(texts)


def texts_and_reversals(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Demonstrations that reverse one text in three."""
    system = {"role": "system", "content": SYSTEM}
    return [
        {"messages": [system, *turns(text)], "completion": wrapped(text if place % 3 else text[::-1])}
        for place, text in enumerate(texts)
    ]


def wrapped(text: str) -> str:
    return f"<reversed_text>{text}</reversed_text>"


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def copy_with_embeddings(source: Path, target: Path, text: str) -> None:
    """Copy a model's folder and give the tokens of a text embeddings of their own, where the model has none."""
    shutil.copytree(source, target)
    tokens = sorted(set(Tokenizer.from_file(str(target / "tokenizer.json")).encode(text, add_special_tokens=False).ids))
    mx.random.seed(0)
    for file in sorted(target.glob("*.safetensors")):
        arrays = mx.load(str(file))
        tables = {name: tell_apart(table, tokens) for name, table in arrays.items() if name.endswith(TABLES)}
        if tables:
            written = file.with_suffix(".new.safetensors")
            mx.save_safetensors(str(written), arrays | tables, metadata={"format": "pt"})
            written.replace(file)


def tell_apart(table_VH: mx.array, tokens: Sequence[int]) -> mx.array:
    """The table with random directions of the old lengths for those of `tokens` that have a twin."""
    rows_VH = table_VH.astype(mx.float32)
    lengths_V = mx.linalg.norm(rows_VH, axis=1)
    directions_VH = rows_VH / lengths_V[:, None]
    is_twin_TV = directions_VH[mx.array(tokens)] @ directions_VH.T > TWINS
    for token, num_alike in zip(tokens, is_twin_TV.sum(axis=1).tolist(), strict=True):
        if num_alike > 1:  # it is like itself
            direction_H = mx.random.normal((rows_VH.shape[1],))
            rows_VH[token] = direction_H * (lengths_V[token] / mx.linalg.norm(direction_H))
    return rows_VH.astype(table_VH.dtype)
