"""Folders of tiny hybrids as transformers writes them, whose weights come from the seed of a reference.

`scripts/build_hybrid_references.py` writes the references with this module in an environment with torch, without ours.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

REFERENCES = Path(__file__).parent / "references"
NAMES = tuple(sorted(path.stem for path in REFERENCES.glob("*.json")))
ZERO_CENTRED = ("qwen3_5", "qwen3_next")
"""Architectures whose norms, but those of recurrent layers, multiply by 1 + weight."""


def read(name: str) -> dict[str, Any]:
    reference: dict[str, Any] = json.loads((REFERENCES / f"{name}.json").read_text())
    return reference


def make_weights(reference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Weights of the reference's shapes, float32, with gates that forget at once, slowly and hardly.

    The generator is one that numpy has frozen.
    """
    chance = np.random.RandomState(reference["seed"])
    return {name: drawn(name, shape, reference, chance) for name, shape in sorted(reference["tensors"].items())}


def drawn(name: str, shape: list[int], reference: Mapping[str, Any], chance: np.random.RandomState) -> np.ndarray:
    normal, uniform = chance.standard_normal(shape), chance.uniform(size=shape)
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last == "A_log":
        values = math.log(0.01) + uniform * math.log(1600)
    elif last == "dt_bias":
        values = -4 + 5 * uniform
    elif "conv" in name and len(shape) == 3:
        values = 0.5 * normal
    elif len(shape) >= 2:
        values = normal * shape[-1] ** -0.5
    elif last == "D":
        values = 1 + 0.3 * normal
    elif "norm" in name:
        is_zero_centred = reference["files"]["config.json"]["model_type"].startswith(ZERO_CENTRED)
        values = 0.1 * normal + (0 if is_zero_centred and "linear_attn" not in name else 1)
    else:
        values = 0.3 * normal
    return np.asarray(values, np.float32)


def loss_weights(count: int, seed: int) -> np.ndarray:
    """What the log-probs of a loss are multiplied with."""
    return np.random.RandomState(1000 + seed).standard_normal(count).astype(np.float32)


def directions(gradients: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A vector for each gradient (outputs, inputs), which its reference is multiplied with to be short."""
    return {
        name: np.random.RandomState(place).standard_normal(shape[1]).astype(np.float32)
        for place, (name, shape) in enumerate(sorted(gradients.items()))
    }


def short_name(name: str) -> str:
    """The name of a linear layer's weight from its layer on: both libraries have these."""
    return name[name.index("layers.") :].replace(".linear.", ".")
