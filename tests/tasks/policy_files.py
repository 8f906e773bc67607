"""Policy nets with random weights as safetensors files, and their forward in NumPy, float64."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from parallm.model.policy_nets.config import read_config

Weights = dict[str, np.ndarray]
DISCRETE = {"type": "discrete", "n": 3}
MLP: dict[str, Any] = {"model_type": "mlp_policy", "observation_size": 4, "action_space": DISCRETE, "critic": [8]}
MLP["actor"] = [8]
LSTM = MLP | {"model_type": "lstm_policy", "trunk": [6], "rnn_size": 5}
GRU = LSTM | {"model_type": "gru_policy"}
BOX = MLP | {"action_space": {"type": "box", "shape": [2], "low": -0.5, "high": [1.0, 2.0]}}


def weights_of(config: Mapping[str, Any], seed: int = 0) -> Weights:
    chance = np.random.default_rng(seed)
    shapes = read_config(json.dumps(config)).shapes()
    return {name: chance.normal(size=shape).astype(np.float32) * 0.7 for name, shape in shapes.items()}


def policy_file(config: Mapping[str, Any] | None, weights: Weights | None = None, **metadata: Any) -> bytes:
    """A file as a trainer sends it; without a configuration it has to be a version of a net that is there."""
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    if config is not None:
        texts["config"] = json.dumps(config)
    arrays = weights if weights is not None else weights_of(config or MLP)
    return save(arrays, metadata=texts or None)


def write_policy(folder: Path, config: Mapping[str, Any] = MLP, **files: Any) -> Path:
    """A folder for `tasks.policies`; `files` are more JSON files by their names."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(policy_file(None, weights_of(config)))
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def layers(weights: Weights, part: str, x: np.ndarray, *, is_last_plain: bool) -> np.ndarray:
    names = sorted({name.rpartition(".")[0] for name in weights if name.startswith(f"{part}.")})
    for name in names:
        x = x @ weights[f"{name}.weight"].T.astype(np.float64) + weights[f"{name}.bias"]
        if not (is_last_plain and name == names[-1]):
            x = np.tanh(x)
    return x


def lstm(weights: Weights, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gates = x @ weights["rnn.weight_ih_l0"].T + weights["rnn.bias_ih_l0"]
    gates = gates + h @ weights["rnn.weight_hh_l0"].T + weights["rnn.bias_hh_l0"]
    i, f, g, o = np.split(gates, 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru(weights: Weights, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    r, z, n = np.split(x @ weights["rnn.weight_ih_l0"].T + weights["rnn.bias_ih_l0"], 3, axis=1)
    hidden_r, hidden_z, hidden_n = np.split(h @ weights["rnn.weight_hh_l0"].T + weights["rnn.bias_hh_l0"], 3, axis=1)
    z = sigmoid(z + hidden_z)
    return (1 - z) * np.tanh(n + sigmoid(r + hidden_r) * hidden_n) + z * h
