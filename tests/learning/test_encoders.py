"""Adapters that make vectors and labels learn on the embedded model, and not with a learning rate of 0."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import evaluations, train

SIGNS = {"+": "sum", "-": "difference", "*": "product"}
COMMON = ("learner.learning_rate=5e-3", "model.lora.rank=16", "checkpoint.every=1000", "trainer.evaluate_problems=128")


def numbers() -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(1, 50) for b in range(1, 50)]
    random.Random(0).shuffle(pairs)
    return pairs[:1600]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.learning
def test_sums_find_their_answers(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    data = write(tmp_path / "sums.jsonl", [{"anchor": f"{a} + {b}", "positive": f"#### {a + b}"} for a, b in numbers()])
    given = (
        "learner=embedding",
        f"learner.data={data}",
        "rollout.problems_per_step=128",
        "learner.pooling=last",
        *COMMON,
    )
    steps = request_of_tests().size(120, 2)
    began = time.perf_counter()
    train(tmp_path / "run", *given, f"trainer.steps={steps}")
    seconds = time.perf_counter() - began
    train(tmp_path / "still", *given, "trainer.steps=5", "learner.learning_rate=0")
    before, *_, after = (row["heldout_part/mrr@10"] for row in evaluations(tmp_path / "run"))
    still = [row["heldout_part/mrr@10"] for row in evaluations(tmp_path / "still")]
    record_property("tasks.embedding_before", before)
    record_property("tasks.embedding_mrr", after)
    record_property("tasks.embedding_seconds", seconds)
    record_property("tasks.embedding_control_gain", still[-1] - still[0])


@pytest.mark.learning
def test_questions_find_their_labels(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    coin = random.Random(1)
    rows = [
        {"text": f"What is {a} {sign} {b}?", "label": SIGNS[sign]}
        for a, b in numbers()
        for sign in [coin.choice([*SIGNS])]
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    given = ("learner=classifier", f"learner.data={data}", "rollout.problems_per_step=32", *COMMON)
    train(tmp_path / "run", *given, f"trainer.steps={request_of_tests().size(30, 2)}")
    train(tmp_path / "still", *given, "trainer.steps=5", "learner.learning_rate=0")
    before, *_, after = (row["heldout/accuracy"] for row in evaluations(tmp_path / "run"))
    still = [row["heldout/accuracy"] for row in evaluations(tmp_path / "still")]
    record_property("tasks.classifier_before", before)
    record_property("tasks.classifier_accuracy", after)
    record_property("tasks.classifier_control_gain", still[-1] - still[0])
