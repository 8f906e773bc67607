"""Whole runs: pairs of texts make an adapter of vectors, texts with labels a classifier, beside a policy."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from parallm.errors import AdapterError, ConfigError, ProblemError
from parallm.model.adapters.adapter import HEAD
from parallm.model.adapters.files import read_adapter

Train = Callable[..., int]
NAMES = ("sum", "difference", "product")
FAST = {"learning_rate": 5e-3, "warmup_steps": 0}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    rows = [{"anchor": f"{a} + {b}", "positive": f"#### {a + b}"} for a in range(2, 18) for b in range(2, 18)]
    return write(tmp_path / "sums.jsonl", rows)


@pytest.fixture
def kinds(tmp_path: Path) -> str:
    rows = [
        {"text": f"What is {a} {sign} {b}?", "label": name}
        for sign, name in zip("+-*", NAMES, strict=True)
        for a in range(2, 12)
        for b in range(2, 12)
    ]
    return write(tmp_path / "kinds.jsonl", rows)


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name and name != "time"} for row in rows]


def test_vectors_are_trained_kept_and_served_by_name(
    train: Train, run_with_client: Train, sums: str, tmp_path: Path
) -> None:
    learner = {"trains": "embedding", "data": sums, "dimensions": (16,), **FAST}
    trainer = {"steps": 4, "evaluate_problems": 16, "evaluate_every": 2}

    def act(client: httpx.Client) -> None:
        body = {"model": "policy", "input": ["2 + 3"]}
        whole = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"][0]["embedding"]
        short = client.post("/v1/embeddings", json=body | {"dimensions": 16}).raise_for_status().json()
        cut = np.array(whole[:16]) / np.linalg.norm(whole[:16])
        assert short["data"][0]["embedding"] == pytest.approx(cut, abs=1e-5)
        chat = {"model": "policy", "messages": [{"role": "user", "content": "2 + 3"}]}
        answer = client.post("/v1/chat/completions", json=chat)
        assert (answer.status_code, "/v1/embeddings" in answer.text) == (400, True)

    assert train(learner=learner, trainer=trainer) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluations.jsonl")] == [0, 2, 4]
    kept = read_adapter(tmp_path / "run" / "adapter")
    assert kept.task is not None
    assert (kept.task.task, kept.task.pooling, kept.task.dimensions is not None) == ("embed", ("mean",), True)
    again = {"adapter": str(tmp_path / "run"), "lora": {"rank": 4}}
    assert run_with_client(act, learner=learner, trainer={"steps": 9}, model=again) == 0


def test_vectors_leave_the_base_and_versions_of_a_policy_as_they_are(
    run_with_client: Train, sums: str, tmp_path: Path
) -> None:
    """To the bit, as JSON has all digits: log-probs of a completion, and the base's own vectors."""
    learner = {"trains": "embedding", "data": sums, "pooling": "last", **FAST}

    def act(client: httpx.Client) -> None:
        ask = {"prompt": "2 + 3 =", "max_tokens": 8, "temperature": 0, "logprobs": 5}

        def answers(*models: str) -> list[Any]:
            written = [client.post("/v1/completions", json=ask | {"model": model}) for model in models]
            made = client.post("/v1/embeddings", json={"model": "base", "input": ["2 + 3", "a sum"]})
            texts = [answer.raise_for_status().json()["choices"] for answer in written]
            return [*texts, made.raise_for_status().json()["data"]]

        def vector() -> list[float]:
            answer = client.post("/v1/embeddings", json={"model": "vectors", "input": "2 + 3"}).raise_for_status()
            return list(answer.json()["data"][0]["embedding"])

        train_until(client, "poet", 1)
        train_until(client, "vectors", 1)
        poet = f"poet@{version_of(client, 'poet')}"
        before, own = answers("base", poet), vector()
        train_until(client, "vectors", version_of(client, "vectors") + 2)
        assert answers("base", poet) == before
        assert vector() != own
        assert answers("poet")[0] != before[0], "a version of its own has other numbers"

    tasks = {"pooling": "mean", "end_token": "append"}
    parts = {"policies": {"poet": {}, "vectors": {"learner": learner}}, "tasks": tasks}
    assert run_with_client(act, trainer={"steps": 200, "evaluate_problems": 0}, **parts) == 0


def version_of(client: httpx.Client, policy: str) -> int:
    status = client.get("/v1/training/status").raise_for_status().json()
    return int(status["policies"][policy]["version"])


def train_until(client: httpx.Client, policy: str, version: int) -> None:
    """Step the paused run until `policy` has this version."""
    while version_of(client, policy) < version:
        client.post("/v1/training/update", json={"policy": policy}).raise_for_status()


def test_a_policy_of_vectors_begins_as_the_base_pooled_as_it_will_be(
    run_with_client: Train, sums: str, kinds: str
) -> None:
    vectors = {"learner": {"trains": "embedding", "data": sums, "pooling": "last", "learning_rate": 0.0}}
    labels = {"learner": {"trains": "classifier", "data": kinds, "learning_rate": 0.0}}

    def act(client: httpx.Client) -> None:
        def embedding(model: str) -> Any:
            answer = client.post("/v1/embeddings", json={"model": model, "input": "2 + 3"}).raise_for_status().json()
            return answer["model"], answer["data"][0]["embedding"]

        first = embedding("vectors")
        assert first[0] == "vectors@0"
        assert embedding("vectors@0") == first
        assert embedding("base")[1] != first[1], "the base pools another way"
        refused = client.post("/classify", json={"model": "labels", "input": "2 + 3"})
        assert (refused.status_code, "no version yet" in refused.text) == (409, True)

    parts = {"policies": {"vectors": vectors, "labels": labels}}
    tasks = {"pooling": "mean", "end_token": "append"}
    assert run_with_client(act, trainer={"steps": 200, "evaluate_problems": 0}, tasks=tasks, **parts) == 0


def test_a_classifier_is_trained_and_kept_with_its_labels(train: Train, kinds: str, tmp_path: Path) -> None:
    learner = {"trains": "classifier", "data": kinds, **FAST}
    trainer = {"steps": 12, "evaluate_problems": 64, "evaluate_every": 12}
    assert train(learner=learner, trainer=trainer, rollout={"problems_per_step": 24}) == 0
    before, after = rows_of(tmp_path / "run", "evaluations.jsonl")
    assert after["heldout/low"] > before["heldout/high"]
    assert after["heldout_part/f1"] > 0.8
    kept = read_adapter(tmp_path / "run" / "adapter")
    assert kept.task is not None
    assert (kept.task.labels, kept.arrays[HEAD].shape[0]) == (tuple(sorted(NAMES)), 3)
    again = {"steps": 1, "evaluate_problems": 64}
    train(folder="on", learner=learner, trainer=again, model={"adapter": str(tmp_path / "run"), "lora": {"rank": 4}})
    assert rows_of(tmp_path / "on", "evaluations.jsonl")[0]["heldout/accuracy"] == after["heldout/accuracy"]
    with pytest.raises(AdapterError, match="classifies texts and writes none"):
        train(folder="rl", model={"adapter": str(tmp_path / "run" / "adapter"), "lora": {"rank": 4}})


@pytest.mark.parametrize(
    "rows",
    [
        [
            {"text": f"{a} + {b}", "labels": ["even"] * (a % 2 == 0) + ["small"] * (b < 5)}
            for a in range(9)
            for b in range(9)
        ],
        [{"text": f"{a} + {b}", "label": float(a < b)} for a in range(9) for b in range(9)],
    ],
    ids=["several labels", "a number"],
)
def test_several_labels_and_numbers_are_trained_by_binary_cross_entropy(
    train: Train, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    learner = {"trains": "classifier", "data": write(tmp_path / "rows.jsonl", rows), **FAST}
    assert train(learner=learner, trainer={"steps": 8, "evaluate_problems": 4}, rollout={"problems_per_step": 24}) == 0
    losses = [row["update/loss"] for row in rows_of(tmp_path / "run")]
    assert losses[-1] < losses[0]


def test_a_class_may_have_the_name_that_numbers_have(train: Train, tmp_path: Path) -> None:
    rows = [{"text": f"{a} + {b}", "label": "score" if a < b else "foul"} for a in range(6) for b in range(6)]
    learner = {"trains": "classifier", "data": write(tmp_path / "rows.jsonl", rows), **FAST}
    assert train(learner=learner, trainer={"steps": 1, "evaluate_problems": 0}) == 0
    kept = read_adapter(tmp_path / "run" / "adapter").task
    assert kept is not None
    assert (kept.task, kept.labels, kept.activation) == ("classify", ("foul", "score"), "softmax")


NAME, NAMES_OF_A_TEXT, NUMBER = {"label": "even"}, {"labels": ["even", "small"]}, {"label": 0.5}


@pytest.mark.parametrize(
    ("first", "then", "named"),
    [
        (NAME, NAMES_OF_A_TEXT, "any number of names under labels, and model.adapter was trained for one name"),
        (NAMES_OF_A_TEXT, NAME, "one name under label, and model.adapter was trained for any number of names"),
        (NAME, NUMBER, "a number under label, and model.adapter was trained for one name"),
        (NUMBER, NAME, "one name under label, and model.adapter was trained for a number"),
    ],
)
def test_a_classifier_is_trained_further_on_lines_of_its_own_form_alone(
    train: Train, tmp_path: Path, first: dict[str, Any], then: dict[str, Any], named: str
) -> None:
    def learner(row: dict[str, Any]) -> dict[str, Any]:
        other = {"label": "small"} if row == NAME else row
        rows = [{"text": f"{a} + 1", **(row if a % 2 else other)} for a in range(6)]
        return {"trains": "classifier", "data": write(tmp_path / "rows.jsonl", rows), **FAST}

    trainer = {"steps": 1, "evaluate_problems": 0}
    assert train(learner=learner(first), trainer=trainer) == 0
    again = {"adapter": str(tmp_path / "run"), "lora": {"rank": 4}}
    assert train(folder="same", learner=learner(first), trainer=trainer, model=again) == 0
    with pytest.raises(ProblemError, match=named):
        train(folder="other", learner=learner(then), trainer=trainer, model=again)


def test_a_learning_rate_of_zero_makes_no_version(train: Train, sums: str, tmp_path: Path) -> None:
    learner = {"trains": "embedding", "data": sums, "learning_rate": 0.0}
    train(learner=learner, trainer={"steps": 2, "evaluate_problems": 16, "evaluate_every": 1})
    rows = rows_of(tmp_path / "run", "evaluations.jsonl")
    assert len({row["heldout_part/mrr@10"] for row in rows}) == 1
    assert {row["update/version"] for row in rows_of(tmp_path / "run")} == {0}


def test_a_resumed_run_is_the_same_run(train: Train, sums: str, tmp_path: Path) -> None:
    parts = {"learner": {"trains": "embedding", "data": sums, **FAST}, "model": {"lora": {"dropout": 0.1, "rank": 4}}}
    train(folder="whole", trainer={"steps": 4}, **parts)
    train(folder="parts", trainer={"steps": 2}, **parts)
    train(folder="parts", trainer={"steps": 4}, checkpoint={"resume": "auto"}, **parts)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("trains", "row", "text"),
    [
        ("embedding", {"anchor": "a"}, "should have a text under anchor and positive"),
        ("embedding", {"anchor": "a", "positive": "b", "negatives": "c"}, "should have a text under anchor"),
        ("classifier", {"text": "a", "label": 7}, "write the names of numbered labels"),
        ("classifier", {"text": "a", "labels": ["b", "b"]}, "each once"),
        ("classifier", {"text": "a", "label": "b"}, "a classifier needs two or more"),
    ],
)
def test_lines_that_cannot_be_used_are_refused(
    train: Train, tmp_path: Path, trains: str, row: dict[str, Any], text: str
) -> None:
    learner = {"trains": trains, "data": write(tmp_path / "rows.jsonl", [row])}
    with pytest.raises(ProblemError, match=text):
        train(learner=learner)


def test_sizes_larger_than_the_vectors_are_refused(train: Train, sums: str) -> None:
    with pytest.raises((ProblemError, ConfigError), match="is more than the"):
        train(learner={"trains": "embedding", "data": sums, "dimensions": (100_000,)})


def test_a_policy_beside_them_is_trained_as_if_it_were_alone(
    train: Train, sums: str, kinds: str, tmp_path: Path
) -> None:
    vectors = {"learner": {"trains": "embedding", "data": sums, **FAST}}
    labels = {"learner": {"trains": "classifier", "data": kinds, **FAST}}
    train(folder="alone", trainer={"steps": 2}, policies={"poet": {}})
    train(folder="beside", trainer={"steps": 2}, policies={"poet": {}, "vectors": vectors, "labels": labels})
    digests = [read_adapter(tmp_path / folder / "poet" / "adapter").digest for folder in ("alone", "beside")]
    assert digests[0] == digests[1]
    kept = [read_adapter(tmp_path / "beside" / name / "adapter") for name in ("vectors", "labels")]
    assert [adapter.task.task for adapter in kept if adapter.task is not None] == ["embed", "classify"]
