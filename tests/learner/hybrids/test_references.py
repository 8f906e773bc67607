"""Packed hybrids against transformers: logits, and gradients of linear layers.

`scripts/build_hybrid_references.py` writes the references.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from parallm.learner.passes.packing import Segment, can_pack, packed_hidden
from parallm.model.load import NANO, load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from tests.learner.hybrids.reference_folders import NAMES, directions, loss_weights, make_weights, read, short_name

TOLERANCE = 1e-3


def load(reference: dict[str, Any], folder: Path) -> SharedModel:
    arrays = {renamed(name, reference): mx.array(array) for name, array in make_weights(reference).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(reference["files"]["config.json"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return load_shared_model(ModelSettings(path=str(folder), lora=LoraSettings(rank=2)))


def renamed(name: str, reference: dict[str, Any]) -> str:
    for part, other in reference["renamed"].items():
        name = name.replace(f".{part}.", f".{other}.")
    return name


def packed_logits(model: SharedModel, reference: dict[str, Any]) -> list[mx.array]:
    """Logits of each whole row, out of one packed forward."""
    prompt, completions = reference["prompt"], reference["completions"]
    flat = mx.array(prompt + [token for completion in completions for token in completion])
    segment = Segment(prompt=len(prompt), runs=tuple((1, len(completion)) for completion in completions))
    logits = model.head(packed_hidden(model, flat, [segment], None))
    cuts = np.cumsum([len(prompt), *map(len, completions)])[:-1].tolist()
    shared, *own = mx.split(logits, cuts)
    return [mx.concatenate([shared, rows]) for rows in own]


def gradients(model: SharedModel, reference: dict[str, Any]) -> dict[str, mx.array]:
    """Gradients of the reference's loss with respect to the weights of linear layers, by short names.

    mlx-lm folds factors of Falcon-H1 into its weights: these are gradients of the weights that are stored."""
    weights = {
        name: array
        for name, array in tree_flatten(model.base.parameters())
        if "layers." in name and short_name(name) in reference["gradients"]
    }

    def loss(weights: dict[str, mx.array]) -> mx.array:
        model.base.update(tree_unflatten(list(weights.items())))
        total = mx.zeros(())
        for place, logits in enumerate(packed_logits(model, reference)):
            completion = reference["completions"][place]
            rows = logits[-len(completion) - 1 : -1]
            logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
            chosen = mx.take_along_axis(logprobs, mx.array(completion)[:, None], axis=-1)[:, 0]
            total = total + (chosen * mx.array(loss_weights(len(completion), place))).sum()
        return total

    found = mx.grad(loss)(weights)
    model.base.update(tree_unflatten(list(weights.items())))
    stored = {short_name(name): array for name, array in make_weights(reference).items() if "layers." in name}
    folded = {name: array / mx.array(stored[short_name(name)]) for name, array in weights.items()}
    return {short_name(name): gradient * folded[name] for name, gradient in found.items()}


def relative(found: mx.array, expected: list[Any]) -> float:
    wanted = mx.array(expected)
    return float((mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item())


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    reference = read(name)
    model = load(reference, tmp_path)
    assert can_pack(model)
    pairs = zip(packed_logits(model, reference), reference["logits"], strict=True)
    of_logits = max(relative(found, expected) for found, expected in pairs)
    found = gradients(model, reference)
    assert len(found) >= 4
    along = directions({short: gradient_shape(reference, short) for short in reference["gradients"]})
    errors = {
        short: relative(gradient @ mx.array(along[short]), reference["gradients"][short])
        for short, gradient in found.items()
    }
    record_property("hybrid.reference_logits_error", of_logits)
    record_property("hybrid.reference_gradients_error", max(errors.values()))
    assert of_logits <= TOLERANCE
    assert max(errors.values()) <= TOLERANCE, errors


def test_a_model_that_forgets_otherwise_would_be_seen(tmp_path: Path) -> None:
    reference = read("qwen3_5_text")
    model = load(reference, tmp_path)
    layer = model.base.layers[0].linear_attn
    layer.A_log = layer.A_log + 0.5
    pairs = zip(packed_logits(model, reference), reference["logits"], strict=True)
    assert max(relative(found, expected) for found, expected in pairs) > 10 * TOLERANCE


def gradient_shape(reference: dict[str, Any], short: str) -> tuple[int, int]:
    outputs, inputs = next(shape for name, shape in reference["tensors"].items() if name.endswith(short))
    return outputs, inputs
