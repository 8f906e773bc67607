"""Tiny mixtures and adapters of their experts that PEFT has computed with; all numbers come from seeds.

`scripts/build_expert_references.py` writes the references with this module in an environment with torch, without ours.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REFERENCES = Path(__file__).parent / "expert_references.json"
NANO = Path(__file__).parents[3] / "parallm" / "model" / "nano"
TOKENS = tuple(int(token) for token in np.random.RandomState(5).randint(2, 385, 40))
"""More than the 64 rows from which on mlx-lm sorts experts."""


def read_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = json.loads(REFERENCES.read_text())
    return cases


def drawn(shapes: Mapping[str, Sequence[int]], seed: int, size: float) -> dict[str, np.ndarray]:
    """Arrays of these shapes, float32, in the order of their names; norms are near one."""
    chance = np.random.RandomState(seed)
    arrays = {}
    for name in sorted(shapes):
        values = chance.standard_normal(tuple(shapes[name]))
        is_norm = len(shapes[name]) == 1 and name.endswith("norm.weight")
        scale = 1 / shapes[name][-1] ** 0.5 if name.endswith("weight") else 0.1
        arrays[name] = (1 + 0.1 * values if is_norm else size * scale * values).astype(np.float32)
    return arrays


def write_base(case: Mapping[str, Any], folder: Path, *, for_mlx: bool = False) -> Path:
    """Write a base as its checkpoint on the hub would be, with the embedded model's tokenizer. Returns `folder`.

    mlx-lm reads gpt_oss from the hub in MXFP4 alone, and plain with its own names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    weights = drawn(case["weights"], 1, 2.0)
    if for_mlx and case["config"]["model_type"] == "gpt_oss":
        weights = _apart(weights)
    write_safetensors(weights, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((NANO / name).read_bytes())
    return folder


def _apart(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of gpt_oss under mlx-lm's names: gate and up take turns, inputs come last."""
    own = {}
    for name, array in weights.items():
        head, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            end = "bias" if last.endswith("bias") else "weight"
            for part, values in (("gate_proj", array[..., ::2]), ("up_proj", array[..., 1::2])):
                own[f"{head}.{part}.{end}"] = np.ascontiguousarray(values if end == "bias" else values.swapaxes(1, 2))
        elif last == "down_proj":
            own[f"{name}.weight"] = np.ascontiguousarray(array.swapaxes(1, 2))
        elif last == "down_proj_bias":
            own[f"{head}.down_proj.bias"] = array
        else:
            own[name] = array
    return own


def write_adapter(adapter: Mapping[str, Any], folder: Path) -> Path:
    """Write an adapter as PEFT saved it. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter["config"]))
    write_safetensors(drawn(adapter["tensors"], 2, 1.0), folder / "adapter_model.safetensors")
    return folder


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
