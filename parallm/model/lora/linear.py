"""LoRA on the base's linear layers and experts: what a forward adds, chosen anew for each forward.

There is one module tree for serving and training. A layer owns no adapter arrays: it asks the `LoraContext` that all
target modules of a model share. A caller binds a `LoraBinding` around its forward (`SharedModel.hidden`), on the device
thread. `selector.py` chooses the binding; on CUDA targets that get the same input share a `MergedLinear`.

LoRA: https://arxiv.org/abs/2106.09685. Axes: B rows, T tokens, M tokens of all rows, I input, O output, S
parts of a sum.
"""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels import quantized_gemm
from parallm.model.kernels.add_norm import MAX_ROWS_OF_A
from parallm.model.kernels.columns import columns_of, flat_rows, shaped
from parallm.model.kernels.cuda import VECTOR_BYTES
from parallm.model.kernels.segmented_lora import GroupOutput, GroupWeights, ShrinkOutput, shrink
from parallm.model.kernels.small_batch_gemm import ShrunkRows, can_add, fits, small_batch_gemm
from parallm.model.kernels.swiglu import swiglu_of_halves
from parallm.model.lora.experts import Routing
from parallm.model.lora.segmented import MIN_LONG, SegmentedLora, add_products
from parallm.model.lora.training import DropoutLora, TrainingLora
from parallm.model.patches.forward import FusedAdd, NormedSum, ResidualSum, SwigluHalf, origin_of, set_origin, swiglu
from parallm.model.quantized import UnpackingLinear

ARRAYS = ("weight", "scales", "biases", "bias")
"""Arrays of linear layers, quantized or not; the first axis of each is the output."""
JOINED = (nn.Linear, nn.QuantizedLinear, UnpackingLinear)
"""Types of layers that can be rows of one."""


class LoraBinding(Protocol):
    """LoRA of one forward's rows."""

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        """The output `y` (B, T, O) of `target` plus LoRA's product for its input `x` (B, T, I), if it has one."""

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        """The same for experts: the output `y` (.., 1, O) of rows `x` (.., 1, I) that `routing` sends to them."""

    def dora_scale(self, target: str) -> mx.array | None:
        """DoRA's factor of the outputs of `target` minus 1, (O,) or (B, 1, O), or None."""


class LoraContext:
    """The binding that all targets of one model apply now."""

    def __init__(self) -> None:
        self.lora: LoraBinding | None = None  # written only by `applied`, on the device thread

    @property
    def is_served(self) -> bool:
        """Whether kernels without gradients may compute what runs now: LoRA, if there is any, is that of the engine."""
        return self.lora is None or isinstance(self.lora, SegmentedLora)

    @property
    def is_trained(self) -> bool:
        """Whether what runs now is differentiated by its LoRA, on a GPU."""
        return isinstance(self.lora, TrainingLora | DropoutLora)

    @contextmanager
    def applied(self, lora: LoraBinding | None) -> Iterator[None]:
        """Let the targets apply `lora` inside the block; None leaves the base alone."""
        previous, self.lora = self.lora, lora
        try:
            yield
        finally:
            self.lora = previous


class LoraLinear(nn.Module):
    """A frozen linear layer and the name under which adapters know it."""

    def __init__(self, linear: nn.Module, target: str, lora_context: LoraContext) -> None:
        super().__init__()
        self.linear = linear
        self.target = target
        self.lora_context = lora_context
        self.merged: MergedLinear | None = None

    def __call__(self, x: mx.array) -> mx.array:
        lora = self.lora_context.lora
        if self.merged is not None and x.ndim > 1 and self.merged.serves(lora):
            return self.merged.output(self.target, x, lora)
        y = self.linear(x)
        if lora is None:
            return y
        y = lora.apply(self.target, x, y)
        dora_scale = lora.dora_scale(self.target)
        if dora_scale is None:
            return y
        if dora_scale.ndim > y.ndim:  # of rows, for one token of each
            dora_scale = dora_scale[:, 0]
        # this form rather than a product with the whole factor: a scale of zero changes no bit
        return y + (dora_scale * (y - self.linear.bias if "bias" in self.linear else y)).astype(y.dtype)


class LoraExperts(nn.Module):
    """A frozen layer that holds a matrix for each expert, and the name under which adapters know it."""

    def __init__(self, experts: nn.Module, target: str, lora_context: LoraContext) -> None:
        super().__init__()
        self.experts = experts
        self.target = target
        self.lora_context = lora_context

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Stands in for mlx-lm's layer of the same signature."""
        y: mx.array = self.experts(x, indices, sorted_indices=sorted_indices)
        lora = self.lora_context.lora
        if lora is None:
            return y
        return lora.apply_experts(self.target, x, y, Routing(experts=indices, is_sorted=sorted_indices))


class MergedLinear:
    """Targets that get the same input, such as queries, keys and values, as one product of the base; CUDA only.

    Their weights are rows of one array, and each layer keeps a view of its own rows for the learner: nothing is kept
    twice. The first target that is called computes the outputs of all. Device thread only, one forward at a time.
    """

    def __init__(self, layers: Sequence[LoraLinear], joined: nn.Module) -> None:
        """`joined` is the linear layer with the outputs of `layers` beside each other."""
        self.targets = tuple(layer.target for layer in layers)
        self._widths = [layer.linear.weight.shape[0] for layer in layers]
        self._cuts = [sum(self._widths[:count]) for count in range(1, len(layers))]
        self._joined = joined
        self._linears = [layer.linear for layer in layers]
        self._weight_IO = joined.weight.T if type(joined) is nn.Linear else None
        mx.eval(self._weight_IO)  # a view that no step has to make
        self.whole: Callable[[mx.array], mx.array] | None = None
        """Makes the output of all ranks of a divided base from that of this one; callers of the layer call it."""
        self._is_gated = False  # whether SwiGLU of the outputs was asked for once, as it then always will be
        self._x: mx.array | None = None  # the input that the outputs are of; nothing is kept when all are fetched
        self._outputs: dict[str, mx.array] = {}

    @property
    def num_inputs(self) -> int:
        """Inputs that are computed here."""
        columns: int = self._joined.weight.shape[1]
        return columns * 32 // self._joined.bits if isinstance(self._joined, nn.QuantizedLinear) else columns

    def serves(self, lora: LoraBinding | None) -> bool:
        """Whether it can compute `lora`; else each layer computes its own."""
        if isinstance(lora, TrainingLora):
            return lora.serves(self.targets, self._linears)
        return lora is None or isinstance(lora, SegmentedLora)

    def output(self, target: str, x: mx.array, lora: LoraBinding | None) -> mx.array:
        """The output (B, T, O) of `target` for `x` (B, T, I), the rows' LoRA added."""
        if self._x is not x or target not in self._outputs:
            self._x = x
            self._outputs = dict(zip(self.targets, self._all(x, lora), strict=True))
        output = self._outputs.pop(target)
        if not self._outputs:
            self._x = None
        return output

    def form(self, lora: SegmentedLora | None) -> tuple[object, ...]:
        """What `list_kernels` depends on: layers of one form need the same kernels."""
        weights = lora.of_group(self.targets) if lora else None
        linear = self._joined
        ranks = weights.layout.ranks if weights else ()
        followers = self._is_gated, self.whole is None
        return type(linear), linear.weight.shape, "bias" in linear, tuple(self._widths), ranks, *followers

    def list_kernels(self, x: mx.array, lora: SegmentedLora | None) -> None:
        """Build the outputs for `x`, and what reads them in the forwards before; see `listed_kernels`."""
        outputs = self._all(x, lora)
        if len(outputs) == 1:
            output = outputs[0] if self.whole is None else self.whole(outputs[0])
            if isinstance(origin := origin_of(output + mx.zeros(output.shape, output.dtype)), ResidualSum):
                list_norms(origin, lora)
            return
        weights = lora.of_group(self.targets) if lora else None
        ways = [outputs]
        if weights is not None and x.shape[0] <= MAX_ROWS_OF_A and self._can_add(x, weights):
            shrunk_BK = mx.zeros((x.shape[0] * x.shape[1], sum(weights.layout.ranks)), x.dtype)
            ways.append(self._plus(x, ShrunkRows(weights=weights, shrunk_BK=shrunk_BK)))
        for way in ways if self._is_gated else ():
            swiglu(*way)

    def _all(self, x: mx.array, lora: LoraBinding | None) -> list[mx.array]:
        if isinstance(lora, TrainingLora):
            return self._trained(x, lora)
        weights = lora.of_group(self.targets) if isinstance(lora, SegmentedLora) else None
        if weights is not None and isinstance(lora, SegmentedLora) and (shrunk := self._shrunk(x, weights, lora)):
            return self._plus(*shrunk)
        y, y_SBTO, hidden = self._product(x, weights)
        if weights is not None and y is not None and isinstance(lora, SegmentedLora) and _is_long(x, lora):
            y = add_products(weights, y, x, lora.order_B2[:, 1])
            y_SBTO, weights = y[None], None
        after_a = None
        if weights is not None and isinstance(lora, SegmentedLora):
            hidden = shrink(x, weights, lora.order_B2) if hidden is None else hidden
            after_a = ShrinkOutput(weights=weights, order_B2=lora.order_B2, hidden_PBTK=hidden)
        output = GroupOutput(y_SBTO, x.dtype, self._widths, after_a)
        if y is None or after_a is not None:
            if len(self.targets) == 1:
                return [FusedAdd(output.split()[0], output.added_to, y_SBTO, lora=after_a)]
            return self._halves(output.split(), output.gated)
        if len(self.targets) == 1:
            return [FusedAdd(y, partial(operator.add, y), y_SBTO)] if x.shape[1] == 1 else [y]
        # readers of one token a row find their columns; of more tokens each would copy its own
        parts = output.split() if x.shape[1] > 1 else columns_of(y, self._widths)
        return self._halves(parts, partial(self._gated, x, y))

    def _shrunk(self, x: mx.array, weights: GroupWeights, lora: SegmentedLora) -> tuple[mx.array, ShrunkRows] | None:
        """`x` and its products with A, where the norm that makes `x` can make both."""
        match origin_of(x):
            case NormedSum() as origin if self._can_add(x, weights):
                return origin.shrunk(weights, lora.order_B2)
        return None

    def _can_add(self, x: mx.array, weights: GroupWeights) -> bool:
        return len(self.targets) > 1 and can_add(x, self._joined, weights)

    def _plus(self, x: mx.array, added: ShrunkRows) -> list[mx.array]:
        """The outputs for `x`, with LoRA as a part of the product."""
        y_1BTO, _ = small_batch_gemm(x, self._joined, None, is_whole=True, added=added)
        y = shaped(y_1BTO, y_1BTO.shape[1:])
        return self._halves(columns_of(y, self._widths), partial(self._gated, x, y, added))

    def _gated(self, x: mx.array, y: mx.array, added: ShrunkRows | None = None) -> mx.array:
        """SwiGLU of the outputs `y`, in the product itself where that is a kernel of ours, to which LoRA may be
        `added`. Nothing is differentiated: what trains takes `_trained`."""
        if fits(x, self._joined):
            product_1BTO, _ = small_batch_gemm(x, self._joined, None, is_whole=True, is_gated=True, added=added)
        elif quantized_gemm.fits(x, self._joined):
            product_1BTO = quantized_gemm.quantized_gemm(x, self._joined, is_whole=True, is_gated=True)
        else:
            return swiglu_of_halves(y, has_gradient=False)
        return shaped(product_1BTO, product_1BTO.shape[1:])

    def _product(self, x: mx.array, weights: GroupWeights | None) -> tuple[mx.array | None, mx.array, mx.array | None]:
        """The base's outputs (B, T, O), if they are whole, and as parts (S, B, T, O); the result of `shrink`, if it is
        known already."""
        is_whole, hidden = len(self.targets) > 1, None
        if fits(x, self._joined):
            y_SBTO, hidden = small_batch_gemm(x, self._joined, weights, is_whole=is_whole)
        elif quantized_gemm.fits(x, self._joined):
            y_SBTO = quantized_gemm.quantized_gemm(x, self._joined, is_whole=is_whole)
        elif self._weight_IO is not None:
            y_MO = self._plain_product(flat_rows(x), self._weight_IO)
            shape = *x.shape[:-1], y_MO.shape[1]
            return shaped(y_MO, shape), shaped(y_MO, (1, *shape)), None
        else:
            y = self._joined(x)
            return y, y[None], None
        return shaped(y_SBTO, y_SBTO.shape[1:]) if y_SBTO.shape[0] == 1 else None, y_SBTO, hidden

    def _plain_product(self, x_MI: mx.array, weight_IO: mx.array) -> mx.array:
        """`nn.Linear` without its views."""
        return mx.addmm(self._joined.bias, x_MI, weight_IO) if "bias" in self._joined else x_MI @ weight_IO

    def _trained(self, x: mx.array, lora: TrainingLora) -> list[mx.array]:
        if not self._is_gated:  # a reader of the parts alone would have to copy them
            return lora.outputs(self.targets, self._linears, x)
        y = lora.joined_output(self.targets, self._joined, x)
        return self._halves(mx.split(y, self._cuts, axis=-1), partial(swiglu_of_halves, y))

    def _halves(self, parts: list[mx.array], gated: Callable[[], mx.array]) -> list[mx.array]:
        """`parts`; SwiGLU of two that are alike is `gated`."""

        def take() -> mx.array:
            self._is_gated = True
            return gated()

        if len(parts) == 2 and self._widths[0] == self._widths[1]:
            for index, part in enumerate(parts):
                set_origin(part, SwigluHalf(gated=take, index=index))
        return parts


def _is_long(x: mx.array, lora: SegmentedLora) -> bool:
    """Whether `x` (B, T, I) holds many tokens of prompts: as one row, which has one version, or flat."""
    is_prompt = lora.is_flat or (x.shape[0] == 1 and lora.weights.num_versions == 1)
    return is_prompt and x.shape[0] * x.shape[1] >= MIN_LONG


def list_norms(stream: ResidualSum, lora: SegmentedLora | None) -> None:
    """Build what reads a stream: its norm, also with A of any targets that may follow; see `listed_kernels`."""
    before_BTH = stream.before_BTH
    normed = origin_of(stream.normed(mx.ones(before_BTH.shape[-1], before_BTH.dtype), 1.0))
    if lora is not None and isinstance(normed, NormedSum):
        for weights in lora.of_several():
            normed.shrunk(weights, lora.order_B2)


def merged_linears(base: nn.Module) -> list[MergedLinear]:
    """All of a model, in the order of its layers."""
    merged = [module.merged for module in base.modules() if isinstance(module, LoraLinear) and module.merged]
    return list({id(one): one for one in merged}.values())


def merge_linears(base: nn.Module, called: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Merge the targets that were `called` with one input, where they are alike. Returns the groups, one for each
    target that the kernels can serve."""
    layers = {module.target: module for module in base.modules() if isinstance(module, LoraLinear)}
    called = [targets for targets in called if layers.keys() >= set(targets)]  # no experts
    together = [targets for targets in called if _are_alike([layers[target] for target in targets])]
    joined = {target for targets in together for target in targets}
    groups = [*together, *((target,) for target in layers if target not in joined)]
    groups = [targets for targets in groups if _is_aligned([layers[target] for target in targets])]
    for targets in groups:
        members = [layers[target] for target in targets]
        merged = MergedLinear(members, members[0].linear if len(members) == 1 else _join(members))
        for member in members:
            member.merged = merged
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
    return all(form == forms[0] for form in forms) and type(layers[0].linear) in JOINED


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
