"""Folders of tiny models of transformers and sentence-transformers; weights come from the seed of a reference.

`scripts/build_task_references.py` writes the references with this module in an environment with torch, without ours.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

REFERENCES = Path(__file__).parent / "references"
NAMES = tuple(sorted(path.stem for path in REFERENCES.glob("*.json")))


def read(name: str) -> dict[str, Any]:
    reference: dict[str, Any] = json.loads((REFERENCES / f"{name}.json").read_text())
    return reference


def write_folder(reference: Mapping[str, Any], folder: Path) -> Path:
    """Write the files of a reference and its weights below `folder`, which it returns."""
    for path, content in reference["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    write_safetensors(make_weights(reference["tensors"], reference["seed"]), folder / "model.safetensors")
    return folder


def make_weights(shapes: Mapping[str, list[int]], seed: int) -> dict[str, np.ndarray]:
    """Weights of these shapes, float32: norms near one, all else small. The generator is one that numpy has frozen."""
    chance = np.random.RandomState(seed)
    weights = {}
    for name in sorted(shapes):
        drawn = chance.standard_normal(shapes[name])
        is_norm = (len(shapes[name]) == 1 and name.endswith("norm.weight")) or "LayerNorm.weight" in name
        weights[name] = (1 + 0.1 * drawn if is_norm else 0.25 * drawn).astype(np.float32)
    return weights


def write_safetensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write float32 arrays as https://github.com/huggingface/safetensors describes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(array.tobytes() for array in tensors.values()))
