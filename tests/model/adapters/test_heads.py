"""Adapters with a head of several rows, and adapters for vectors, as PEFT names their layers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import HEAD, Adapter, with_arrays
from parallm.model.adapters.files import read_adapter, read_arrays, write_arrays, write_exactly, write_peft
from parallm.model.shared_model import SharedModel
from parallm.types import TaskSpec
from tests.learner.conftest import build_start

Load = Callable[..., SharedModel]
SPEC = TaskSpec(task="classify", pooling=("last",), activation="softmax", labels=("bad", "so", "good"), source="test")
WEIGHTS = "adapter_model.safetensors"


def with_head(model: SharedModel, rows: int, task: TaskSpec | None) -> Adapter:
    start = build_start(model)
    head_LH = mx.random.normal((rows, 64), key=mx.random.key(3))
    return replace(with_arrays(start, {**start.arrays, HEAD: head_LH}, version=3), task=task)


def test_a_head_and_its_task_come_back_from_files(load_tiny: Load, tmp_path: Path) -> None:
    model = load_tiny("llama")
    made = with_head(model, 3, SPEC)
    write_exactly(made, tmp_path, num_layers=model.num_layers, base_name="tiny", base_sha256=model.sha256)
    found = read_adapter(tmp_path, model.targets)
    assert (found.digest, found.task, found.spec) == (made.digest, SPEC, SPEC)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_a_classifier_of_one_row_is_no_reward_model(load_tiny: Load, tmp_path: Path) -> None:
    model = load_tiny("llama")
    spec = TaskSpec(task="score", pooling=("last",), activation="sigmoid", labels=("fits",), source="test")
    made = with_head(model, 1, spec)
    write_peft(made, tmp_path, "tiny", model_type="llama")
    found = read_adapter(tmp_path, model.targets)
    assert (found.spec, set(found.arrays) == set(made.arrays), found.digest) == (spec, True, made.digest)


def test_a_head_of_another_program_names_its_labels_by_number(load_tiny: Load, tmp_path: Path) -> None:
    model = load_tiny("llama")
    write_peft(with_head(model, 3, SPEC), tmp_path, "tiny", model_type="llama")
    write_arrays(tmp_path / WEIGHTS, read_arrays(tmp_path / WEIGHTS)[0], {"format": "pt"})
    task = read_adapter(tmp_path, model.targets).spec
    assert task is not None
    assert (task.task, task.labels) == ("classify", ("LABEL_0", "LABEL_1", "LABEL_2"))
    assert (task.pooling, task.activation) == (("last",), "softmax")


@pytest.mark.parametrize(
    ("task", "message"),
    [(replace(SPEC, labels=("bad", "good")), "3 rows, and its task 2"), (replace(SPEC, task="embed"), "has a head")],
)
def test_a_head_that_its_task_does_not_fit_is_refused(
    load_tiny: Load, tmp_path: Path, task: TaskSpec, message: str
) -> None:
    model = load_tiny("llama")
    write_peft(with_head(model, 3, task), tmp_path, "tiny", model_type="llama")
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path, model.targets)


def test_an_adapter_for_vectors_has_the_layers_of_the_trunk(load_tiny: Load, tmp_path: Path) -> None:
    model = load_tiny("llama")
    made = build_start(model)
    write_peft(made, tmp_path, "tiny", model_type="llama")
    tensors, _ = read_arrays(tmp_path / WEIGHTS)
    of_trunk = {name.replace("base_model.model.model.", "base_model.model."): tensors[name] for name in tensors}
    write_arrays(tmp_path / WEIGHTS, of_trunk, {"format": "pt"})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    with pytest.raises(AdapterError, match="is no LoRA target"):
        read_adapter(tmp_path, model.targets)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"task_type": "FEATURE_EXTRACTION"}))
    assert read_adapter(tmp_path, model.targets).digest == made.digest
