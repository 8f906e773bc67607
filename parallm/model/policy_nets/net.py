"""Policy nets: observations -> logits or means, values and hidden states. MLP, LSTM and GRU.

A net is immutable, and whoever holds one may go on with it while newer versions are published.
Axes: N rows, O numbers of an observation, H hidden state, A outputs of the actor, I inputs and U outputs of a layer.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from parallm.errors import ModelError
from parallm.model.attention import MIN_COLUMNS
from parallm.model.policy_nets.config import EPISODE_START, HIDDEN, Box, PolicyConfig
from parallm.tensors import Array, Arrays, Signature

MIN_ROWS = 16
"""Least rows of a pass. A strict BLAS computes a row as it does beside others from this number on, also with several
threads."""
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "tanh": mx.tanh,
    "relu": nn.relu,
    "elu": nn.elu,
    "silu": nn.silu,
}


@dataclass(frozen=True, slots=True)
class Linear:
    """A layer whose outputs are padded by zeros to `MIN_COLUMNS`: narrower products depend on the rows beside a row."""

    weight_IU: mx.array
    bias_U: mx.array
    num_outputs: int

    def __call__(self, x_NI: mx.array) -> mx.array:
        return mx.addmm(self.bias_U, x_NI, self.weight_IU)[:, : self.num_outputs]


class PolicyNet:
    """Used on the device thread, where it is made; `config`, `signature` and `num_bytes` anywhere."""

    def __init__(self, config: PolicyConfig, signature: Signature, weights: bytes) -> None:
        """`weights` are a safetensors file that is checked to be whole. Raises ModelError."""
        arrays = mx.load(io.BytesIO(weights), format="safetensors")
        assert isinstance(arrays, dict), "safetensors are names and arrays"
        _check_shapes(config, arrays)
        arrays = {name: array.astype(mx.float32) for name, array in arrays.items()}
        if wrong := [name for name, array in arrays.items() if not mx.isfinite(array).all().item()]:
            raise ModelError(f"the tensor {wrong[0]} holds NaN or infinity")
        self.config = config
        self.signature = signature
        self.num_bytes = sum(array.nbytes for array in arrays.values())
        self._activation = ACTIVATIONS[config.activation]
        self._layers = {
            part: _layers(arrays, part) for part in ("trunk", "actor", "critic") if f"{part}.0.weight" in arrays
        }
        self._log_std_A = arrays.get("log_std")
        if config.rnn_size is not None:
            self._from_input = _linear(arrays, "rnn.weight_ih_l0", "rnn.bias_ih_l0")
            self._from_hidden = _linear(arrays, "rnn.weight_hh_l0", "rnn.bias_hh_l0")
        mx.eval(self._state())

    def run(self, inputs: Arrays) -> dict[str, Array]:
        """Return the outputs of the signature, float32, for arrays by the names of its inputs; hidden states that are
        absent are zeros.

        Each row's numbers are its own: rows are padded to a power of two, and never fewer than `MIN_ROWS`.
        """
        observation_NO = np.concatenate(
            [inputs[spec.name].reshape(len(inputs[spec.name]), -1) for spec in self.signature.observations],
            axis=1,
            dtype=np.float32,
        )
        num_rows = len(observation_NO)
        padded = max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
        x_NO = _padded(observation_NO, padded)
        hidden = {
            name: _padded(self._started(inputs, name, num_rows), padded) for name in HIDDEN[self.config.model_type]
        }
        outputs = self._forward(x_NO, hidden)
        mx.eval(outputs)
        return {name: np.array(array[:num_rows]) for name, array in outputs.items()}

    def _started(self, inputs: Arrays, name: str, num_rows: int) -> Array:
        """Return the hidden state (N, H) that the step begins from."""
        assert self.config.rnn_size is not None, "hidden states are those of recurrent nets"
        state_NH = inputs.get(name)
        if state_NH is None:
            return np.zeros((num_rows, self.config.rnn_size), np.float32)
        starts_N = inputs.get(EPISODE_START)
        return state_NH if starts_N is None else np.where(starts_N[:, None], np.float32(0), state_NH)

    def _forward(self, x_NO: mx.array, hidden: Mapping[str, mx.array]) -> dict[str, mx.array]:
        x_NI = x_NO
        for layer in self._layers.get("trunk", ()):
            x_NI = self._activation(layer(x_NI))
        states = {}
        if self.config.model_type == "lstm_policy":
            states = self._lstm(x_NI, hidden["h"], hidden["c"])
        elif self.config.model_type == "gru_policy":
            states = self._gru(x_NI, hidden["h"])
        x_NI = states.get("h", x_NI)
        outputs = self._distribution(self._head("actor", x_NI))
        if "critic" in self._layers:
            outputs["value"] = self._head("critic", x_NI)[:, 0]
        return outputs | states

    def _head(self, part: str, x_NI: mx.array) -> mx.array:
        *hidden, last = self._layers[part]
        for layer in hidden:
            x_NI = self._activation(layer(x_NI))
        return last(x_NI)

    def _distribution(self, out_NA: mx.array) -> dict[str, mx.array]:
        config = self.config
        if not isinstance(config.action_space, Box):
            return {"logits": out_NA}
        if self._log_std_A is not None:
            return {"mean": out_NA, "log_std": mx.broadcast_to(self._log_std_A, out_NA.shape)}
        mean_NA, log_std_NA = mx.split(out_NA, 2, axis=1)
        if config.log_std_range is not None:
            log_std_NA = mx.clip(log_std_NA, *config.log_std_range)
        return {"mean": mean_NA, "log_std": log_std_NA}

    def _lstm(self, x_NI: mx.array, h_NH: mx.array, c_NH: mx.array) -> dict[str, mx.array]:
        """One step; the gates' order is input, forget, cell, output, as PyTorch's."""
        gates_NU = self._from_input(x_NI) + self._from_hidden(h_NH)
        i_NH, f_NH, g_NH, o_NH = mx.split(gates_NU, 4, axis=1)
        next_NH = mx.sigmoid(f_NH) * c_NH + mx.sigmoid(i_NH) * mx.tanh(g_NH)
        return {"h": mx.sigmoid(o_NH) * mx.tanh(next_NH), "c": next_NH}

    def _gru(self, x_NI: mx.array, h_NH: mx.array) -> dict[str, mx.array]:
        """One step; the gates' order is reset, update, new, as PyTorch's, whose reset gate comes after the product."""
        r_NH, z_NH, n_NH = mx.split(self._from_input(x_NI), 3, axis=1)
        hidden_r_NH, hidden_z_NH, hidden_n_NH = mx.split(self._from_hidden(h_NH), 3, axis=1)
        z_NH = mx.sigmoid(z_NH + hidden_z_NH)
        n_NH = mx.tanh(n_NH + mx.sigmoid(r_NH + hidden_r_NH) * hidden_n_NH)
        return {"h": (1 - z_NH) * n_NH + z_NH * h_NH}

    def _state(self) -> list[Any]:
        layers = [layer for layers in self._layers.values() for layer in layers]
        if self.config.rnn_size is not None:
            layers += [self._from_input, self._from_hidden]
        return [array for layer in layers for array in (layer.weight_IU, layer.bias_U)]


def _check_shapes(config: PolicyConfig, arrays: Mapping[str, mx.array]) -> None:
    """Raise ModelError unless these are the tensors of the configuration."""
    shapes = config.shapes()
    for name in [*shapes, *arrays]:
        if name not in arrays:
            raise ModelError(f"the tensor {name} {list(shapes[name])} is missing; there are {_names(arrays)}")
        if name not in shapes:
            raise ModelError(f"the tensor {name[:100]} is none of this net's, which are {_names(shapes)}")
        if tuple(arrays[name].shape) != shapes[name]:
            raise ModelError(
                f"the tensor {name} has shape {list(arrays[name].shape)}; by config.json it has {list(shapes[name])}"
            )


def _names(tensors: Mapping[str, object]) -> str:
    names = ", ".join(sorted(tensors))
    return names if len(names) <= 400 else f"{names[:400]} and others"


def _layers(arrays: Mapping[str, mx.array], part: str) -> list[Linear]:
    names = [f"{part}.{2 * index}" for index in range(len(arrays))]
    return [_linear(arrays, f"{name}.weight", f"{name}.bias") for name in names if f"{name}.weight" in arrays]


def _linear(arrays: Mapping[str, mx.array], weight: str, bias: str) -> Linear:
    weight_UI, bias_U = arrays[weight], arrays[bias]
    num_outputs = weight_UI.shape[0]
    more = max(0, MIN_COLUMNS - num_outputs)
    return Linear(mx.contiguous(mx.pad(weight_UI, [(0, more), (0, 0)]).T), mx.pad(bias_U, (0, more)), num_outputs)


def _padded(array_NI: Array, num_rows: int) -> mx.array:
    return mx.array(np.pad(array_NI, [(0, num_rows - len(array_NI)), (0, 0)]))
