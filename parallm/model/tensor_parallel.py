"""Tensor parallelism: each process of a group holds a part of every layer (Megatron-LM, https://arxiv.org/abs/1909.08053).

mlx-lm's models know how they are cut (`Model.shard`): queries, keys, values, gate and up by their outputs, the two
layers after them by their inputs, with a sum over all processes. The cut layers become plain ones again, of fewer heads
and hidden units, so that LoRA, joined products and kernels take them as any other. LoRA is cut as its targets are, and
the product of a target with cut inputs is part of the same sum. Embedding, norms and head are whole everywhere, so all
processes get the same logits, bit for bit, as they get the same sums.

Axes: B rows, T tokens, H hidden.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_unflatten

from parallm.errors import ModelError
from parallm.model.kernels import sum_add_norm
from parallm.model.kernels.all_sum import PeerMemory, all_sum, fits
from parallm.model.kernels.columns import memory_of, shaped
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.linear import LoraLinear
from parallm.model.patches.forward import AddNorm, FusedAdd, fuse_norms

CUT_BY_OUTPUTS: Mapping[type[nn.Module], type[nn.Module]] = {
    AllToShardedLinear: nn.Linear,
    QuantizedAllToShardedLinear: nn.QuantizedLinear,
}
CUT_BY_INPUTS: Mapping[type[nn.Module], type[nn.Module]] = {
    ShardedToAllLinear: nn.Linear,
    QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
"""mlx-lm's classes of cut layers, and those of the same arrays without sums."""
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that a base is divided between."""

    group: mx.distributed.Group
    peers: PeerMemory | None = None
    """Memory for small sums, which the GPUs of one host share; None: `group` makes all sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a base is cut. Made by `cut_layers`; belongs to the thread that made it."""

    ranks: Ranks
    by_outputs: frozenset[str]
    """Names of linear layers that compute a part of their outputs."""
    by_inputs: frozenset[str]
    """Names of linear layers that compute all outputs from a part of their inputs."""
    stream: mx.Stream | None
    """The stream of all sums; None: that of the caller. On a CPU several streams compute, and sums of all must begin in
    the same order on all ranks."""

    def whole_shape(self, target: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inputs and outputs of a linear layer in the whole base."""
        inputs, outputs = shape  # a base with experts is not cut
        size = self.ranks.group.size()
        return inputs * (size if target in self.by_inputs else 1), outputs * (size if target in self.by_outputs else 1)

    def own_lora(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """This rank's part of an adapter's arrays (`{target}.lora_a`, `{target}.lora_b`), not evaluated."""
        own = dict(arrays)
        for name, array in arrays.items():
            target, _, kind = name.rpartition(".")
            if kind == "lora_a" and target in self.by_inputs:
                own[name] = self._part(array, 0)
            elif kind == "lora_b" and target in self.by_outputs:
                own[name] = self._part(array, 1)
        return own

    def summed(self, y_BTH: mx.array) -> mx.array:
        """The sum of `y_BTH` over all ranks, in its type: the same bits at each."""
        if self.ranks.peers is not None and fits(y_BTH):
            return all_sum(y_BTH, self.ranks.peers)
        summed_BTH: mx.array = mx.distributed.all_sum(y_BTH, group=self.ranks.group, stream=self.stream)
        return summed_BTH

    def output(self, y_BTH: mx.array) -> mx.array:
        """The whole output of a layer, of which this rank computed `y_BTH`. Sums, and the residual stream from norm to
        norm, are float32; see `sum_add_norm.py`, whose kernel makes those of a decode step where it can."""
        whole_BTH = self.summed(y_BTH.astype(mx.float32))
        parts_SBTH: mx.array = whole_BTH[None]
        kernel: AddNorm = add_norm
        if self.ranks.peers is not None:
            own_SBTH = _parts(y_BTH)
            if sum_add_norm.fits(own_SBTH, y_BTH):
                parts_SBTH, kernel = own_SBTH, partial(sum_add_norm.sum_add_norm, peers=self.ranks.peers)
        output_BTH = whole_BTH.astype(y_BTH.dtype)
        return FusedAdd(output_BTH, lambda stream: (whole_BTH + stream).astype(y_BTH.dtype), parts_SBTH, kernel)

    def smallest(self, number: int) -> int:
        """The smallest of the numbers of all ranks, which all call this in the same order."""
        return int(
            mx.distributed.all_min(mx.array(number, mx.int64), group=self.ranks.group, stream=self.stream).item()
        )

    def _part(self, array: mx.array, axis: int) -> mx.array:
        parts: list[mx.array] = mx.split(array, self.ranks.group.size(), axis=axis)
        return mx.contiguous(parts[self.ranks.group.rank()])


def _parts(y_BTH: mx.array) -> mx.array:
    """Parts (S, B, T, H) of an output where a kernel reads them, LoRA included."""
    if not isinstance(y_BTH, FusedAdd):
        return y_BTH[None]
    if y_BTH.parts is not None and y_BTH.lora is None:
        return y_BTH.parts
    return shaped(memory_of(y_BTH.value), (1, *y_BTH.shape))


def add_norm(parts_SBTH: mx.array, stream_BTH: mx.array, weight_H: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """The stream after its only part, both float32, and its RMSNorm, (B, T, H) in the weight's type."""
    sums_BTH = parts_SBTH[0] + stream_BTH
    return sums_BTH, mx.fast.rms_norm(sums_BTH, weight_H, eps).astype(weight_H.dtype)


class SummedLinear(nn.Module):
    """A linear layer of a part of the inputs: its outputs, LoRA included, are summed over all ranks."""

    def __init__(self, linear: nn.Module, parallel: TensorParallel) -> None:
        super().__init__()
        self.linear = linear
        self._parallel = parallel

    def __call__(self, x: mx.array) -> mx.array:
        return self._parallel.output(self.linear(x))


def cut_layers(base: nn.Module, config: Mapping[str, Any], ranks: Ranks, path: str) -> TensorParallel:
    """Leave this rank's part of the linear layers in `base`. Evaluates nothing; `sum_outputs` follows.

    Raises ModelError for an architecture that mlx-lm cannot cut, or not into as many parts.
    """
    size, model_type = ranks.group.size(), config.get("model_type", "unknown")
    if not hasattr(base, "shard"):
        raise ModelError(
            f"model.path={path}: mlx-lm cannot divide a {model_type} between devices; set "
            "distributed.tensor_parallel=1, or serve another architecture"
        )
    text_config = config.get("text_config", config)
    for key in HEADS:
        if int(text_config.get(key) or size) % size:
            raise ModelError(
                f"model.path={path}: {key} is {text_config[key]}, which distributed.tensor_parallel={size} does not "
                "divide; choose another number"
            )
    try:
        base.shard(ranks.group)
    except ValueError as error:
        raise ModelError(
            f"model.path={path}: distributed.tensor_parallel={size} does not divide its layers: {error}"
        ) from error
    if any(getattr(module, "sharding_group", None) is not None for module in base.modules()):
        raise ModelError(
            f"model.path={path}: the experts of a {model_type} cannot be divided between devices yet; set "
            "distributed.tensor_parallel=1"
        )
    layers = dict(base.named_modules())
    by_outputs = {name: CUT_BY_OUTPUTS[type(layer)] for name, layer in layers.items() if type(layer) in CUT_BY_OUTPUTS}
    by_inputs = {name: CUT_BY_INPUTS[type(layer)] for name, layer in layers.items() if type(layer) in CUT_BY_INPUTS}
    plain = [(name, _plain(layers[name], kind)) for name, kind in (by_outputs | by_inputs).items()]
    for name, layer in plain:
        if name in by_inputs and "bias" in layer and ranks.group.rank() > 0:
            layer.bias = mx.zeros_like(layer.bias)  # the sum has it once
    base.update_modules(tree_unflatten(plain))
    stream = None if on_cuda() else mx.new_stream(mx.default_device())
    return TensorParallel(ranks=ranks, by_outputs=frozenset(by_outputs), by_inputs=frozenset(by_inputs), stream=stream)


def sum_outputs(base: nn.Module, parallel: TensorParallel) -> None:
    """Sum the outputs of layers with cut inputs over all ranks, whatever LoRA adds to them."""
    layers = [(name, layer) for name, layer in base.named_modules() if name in parallel.by_inputs]
    for _, layer in layers:
        if isinstance(layer, LoraLinear) and layer.merged is not None:
            layer.merged.whole = parallel.output
    base.update_modules(tree_unflatten([(name, SummedLinear(layer, parallel)) for name, layer in layers]))
    fuse_norms(base)


def _plain(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The same arrays as a layer without sums."""
    own = copy.copy(layer)
    own.__class__ = kind
    return own
