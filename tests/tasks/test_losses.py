"""Losses and gradients against stored numbers of sentence-transformers and torch, and copies of right documents."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.tasks.losses import binary_cross_entropy, cross_entropy, info_nce, matryoshka

Record = Callable[[str, object], None]
STORED = json.loads((Path(__file__).parent / "losses.json").read_text())
COLUMNS = [mx.array(column) for column in STORED["columns"]]
NOTHING = mx.zeros((5, 10), mx.bool_)


def error(both: tuple[Any, Any], stored: Any) -> float:
    """Largest difference of loss and gradient, relative to the largest of the stored numbers if that is above 1."""
    found, gradient = both
    largest = max(1.0, stored["loss"], float(np.abs(stored["gradient"]).max()))
    differences = [abs(found.item() - stored["loss"]), float(np.abs(np.array(gradient) - stored["gradient"]).max())]
    return max(differences) / largest


def vectors(weight_FD: mx.array) -> tuple[mx.array, mx.array]:
    return COLUMNS[0] @ weight_FD, mx.concatenate(COLUMNS[1:]) @ weight_FD


@pytest.mark.parametrize(("name", "dimensions"), [("info_nce", ()), ("cached", ()), ("matryoshka", (2, 4))])
def test_losses_of_vectors_are_those_of_sentence_transformers(
    name: str, dimensions: tuple[int, ...], record_property: Record
) -> None:
    def loss(weight_FD: mx.array, scale: float = 20.0) -> mx.array:
        return matryoshka(*vectors(weight_FD), NOTHING, scale=scale, dimensions=dimensions).mean()

    weight_FD = mx.array(STORED["weight"])
    found = error(mx.value_and_grad(loss)(weight_FD), STORED[name])
    record_property("tasks.worst_loss_error", found)
    assert found <= 1e-6
    assert error(mx.value_and_grad(lambda weight: loss(weight, 19.9))(weight_FD), STORED[name]) > 1e-3


def test_losses_of_labels_are_those_of_torch(record_property: Record) -> None:
    logits_NL, targets_NL = mx.array(STORED["logits"]), mx.array(STORED["targets"])
    labels_N = targets_NL.argmax(axis=1)
    for name, loss, target in (
        ("bce", binary_cross_entropy, targets_NL),
        ("cross_entropy", cross_entropy, labels_N),
    ):
        found = error(
            mx.value_and_grad(lambda given, loss=loss, t=target: loss(given, t).mean())(logits_NL), STORED[name]
        )
        record_property("tasks.worst_loss_error", found)
        assert found <= 1e-6


def test_a_hidden_document_counts_as_if_it_were_not_there() -> None:
    anchors_PD, documents_CD = vectors(mx.array(STORED["weight"]))
    hidden_PC = mx.arange(10)[None] == mx.array([[7]] * 5)
    without_CD = mx.concatenate([documents_CD[:7], documents_CD[8:]])
    found = info_nce(anchors_PD, documents_CD, hidden_PC, scale=20.0)
    assert mx.allclose(found, info_nce(anchors_PD, without_CD, NOTHING[:, :9], scale=20.0), atol=1e-5).item()
    assert not mx.allclose(found, info_nce(anchors_PD, documents_CD, NOTHING, scale=20.0), atol=1e-3).item()
