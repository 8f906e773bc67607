"""Sites that get the same input, such as queries, keys and values: on CUDA one product of the base serves them.

Their weights are rows of one array, and each layer keeps a view of its own rows, which the learner uses: so nothing is
kept twice. The first site that is called computes the outputs of all.

Axes: B rows, T tokens, I input, O output.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.cuda import VECTOR_BYTES
from parallm.model.kernels.small_batch_gemm import fits, small_batch_gemm
from parallm.model.lora.segmented import GroupOutput, GroupWeights, SegmentedLora, ShrinkOutput, shrink
from parallm.model.lora.single import LoraBinding, LoraLinear
from parallm.model.lora.training import TrainingLora
from parallm.model.patches.provenance import FusedAdd, set_origin
from parallm.model.patches.swiglu import SwigluHalf, swiglu_of_halves

ARRAYS = ("weight", "scales", "biases", "bias")
"""Of linear layers, quantized or not; the first axis of each is the output."""


class MergedLinear:
    """What the sites of a group share. Device thread only, one forward at a time."""

    def __init__(self, layers: Sequence[LoraLinear], joined: nn.Module) -> None:
        """`joined` is the linear layer with the outputs of `layers` beside each other."""
        self.targets = tuple(layer.target for layer in layers)
        self._widths = [layer.linear.weight.shape[0] for layer in layers]
        self._cuts = [sum(self._widths[:count]) for count in range(1, len(layers))]
        self._joined = joined
        self._linears = [layer.linear for layer in layers]
        self._is_gated = False  # whether somebody has asked for SwiGLU of the outputs, as those do who always will
        self._x: mx.array | None = None  # the input that the outputs are of; nothing is kept when all are fetched
        self._outputs: dict[str, mx.array] = {}

    def serves(self, lora: LoraBinding | None) -> bool:
        """Whether this is how to compute `lora`."""
        if isinstance(lora, TrainingLora):
            return lora.serves(self.targets, self._linears)
        return lora is None or isinstance(lora, SegmentedLora)

    def output(self, target: str, x: mx.array, lora: LoraBinding | None) -> mx.array:
        """`target`'s output (B, T, O) for `x` (B, T, I), the product of the rows' adapters added."""
        if self._x is not x or target not in self._outputs:
            self._x = x
            self._outputs = dict(zip(self.targets, self._all(x, lora), strict=True))
        output = self._outputs.pop(target)
        if not self._outputs:
            self._x = None
        return output

    def _all(self, x: mx.array, lora: LoraBinding | None) -> list[mx.array]:
        if isinstance(lora, TrainingLora):
            return self._trained(x, lora)
        weights = lora.of_group(self.targets) if isinstance(lora, SegmentedLora) else None
        y, y_SBTO, hidden = self._product(x, weights)
        products = None
        if weights is not None and isinstance(lora, SegmentedLora):
            hidden = shrink(x, weights, lora.order_B2) if hidden is None else hidden
            products = ShrinkOutput(weights=weights, order_B2=lora.order_B2, hidden_PBTK=hidden)
        output = GroupOutput(y_SBTO, x.dtype, self._widths, products)
        if y is None or products is not None:
            if len(self.targets) == 1:
                return [FusedAdd(output.apart()[0], output.added_to)]
            return self._halves(output.apart(), output.gated)
        if len(self.targets) == 1:
            return [y]
        # What computes with one token of each row reads parts where they are; else copies save others' copies
        parts = output.apart() if x.shape[1] > 1 else mx.split(y, self._cuts, axis=-1)
        return self._halves(parts, partial(swiglu_of_halves, y))

    def _product(self, x: mx.array, weights: GroupWeights | None) -> tuple[mx.array | None, mx.array, mx.array | None]:
        """The base's outputs (B, T, O), if they are whole, and as parts (S, B, T, O); what `shrink` would give, if that
        is known already."""
        if not fits(x, self._joined):
            y = self._joined(x)
            return y, y[None], None
        y_SBTO, hidden = small_batch_gemm(x, self._joined, weights, is_whole=len(self.targets) > 1)
        return mx.squeeze(y_SBTO, 0) if y_SBTO.shape[0] == 1 else None, y_SBTO, hidden

    def _trained(self, x: mx.array, lora: TrainingLora) -> list[mx.array]:
        if not self._is_gated:  # whoever reads them by themselves would have to copy them
            return lora.outputs(self.targets, self._linears, x)
        y = lora.joined_output(self.targets, self._joined, x)
        return self._halves(mx.split(y, self._cuts, axis=-1), partial(swiglu_of_halves, y))

    def _halves(self, parts: list[mx.array], gated: Callable[[], mx.array]) -> list[mx.array]:
        """`parts`; of two that are alike SwiGLU is `gated`."""

        def taken() -> mx.array:
            self._is_gated = True
            return gated()

        if len(parts) == 2 and self._widths[0] == self._widths[1]:
            for place, part in enumerate(parts):
                set_origin(part, SwigluHalf(gated=taken, place=place))
        return parts


def merge_linears(base: nn.Module, called: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Join the sites that were `called` with one input, where they are alike. Returns the groups, one of each site."""
    layers = {module.target: module for module in base.modules() if isinstance(module, LoraLinear)}
    together = [targets for targets in called if _are_alike([layers[target] for target in targets])]
    joined = {target for targets in together for target in targets}
    groups = [*together, *((target,) for target in layers if target not in joined)]
    groups = [targets for targets in groups if _is_aligned([layers[target] for target in targets])]
    for targets in groups:
        members = [layers[target] for target in targets]
        group = MergedLinear(members, members[0].linear if len(members) == 1 else _join(members))
        for member in members:
            member.group = group
    return tuple(groups)


def _are_alike(layers: Sequence[LoraLinear]) -> bool:
    """Whether their arrays can be rows of the same ones."""
    forms = [
        (
            type(layer.linear),
            [(name, layer.linear[name].shape[1:], layer.linear[name].dtype) for name in ARRAYS if name in layer.linear],
            [getattr(layer.linear, name, None) for name in ("bits", "group_size", "mode")],
        )
        for layer in layers
    ]
    return all(form == forms[0] for form in forms) and type(layers[0].linear) in (nn.Linear, nn.QuantizedLinear)


def _is_aligned(layers: Sequence[LoraLinear]) -> bool:
    """Whether the kernels can read each output in whole vectors."""
    return all(layer.linear.weight.shape[0] * 2 % VECTOR_BYTES == 0 for layer in layers)


def _join(layers: Sequence[LoraLinear]) -> nn.Module:
    """One layer with the outputs of all; theirs become views of its arrays."""
    joined = copy.copy(layers[0].linear)
    for name in (name for name in ARRAYS if name in joined):
        array = mx.concatenate([layer.linear[name] for layer in layers])
        mx.eval(array)
        start = 0
        for layer in layers:
            end = start + layer.linear[name].shape[0]
            layer.linear[name] = array[start:end]
            start = end
        mx.eval([layer.linear[name] for layer in layers])
        joined[name] = array
    return joined
