"""LoRA of the version in training: with dropout, and on a GPU with gradients that add to one another.

MLX adds the gradients of one input, from the base's products and from A, with kernels of their own. In `TrainingLora`
the product with A adds itself to the others. Queries, keys and values each add themselves to the one before; gate and
up, whose SwiGLU reads them side by side, are one product forward and backward. Packed weights are unpacked for each
product, and kept by none.

Axes: M tokens, I input, O output, K columns of all A that one input is multiplied by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from parallm.model.lora.experts import Routing
from parallm.model.lora.single import SingleLora
from parallm.model.quantized import UnpackingLinear, floating_type, weights_of

SERVED = (nn.Linear, UnpackingLinear)
"""Types of layers whose gradients `TrainingLora` adds up."""


@dataclass(frozen=True, slots=True)
class DropoutLora:
    """`SingleLora` with inverted dropout before the product."""

    adapter: SingleLora
    probability: float
    keys: Mapping[str, mx.array]

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        return self.adapter.apply(target, self._dropped(target, x), y) if target in self.keys else y

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        return self.adapter.apply_experts(target, self._dropped(target, x), y, routing) if target in self.keys else y

    def dora_scale(self, target: str) -> mx.array | None:
        return self.adapter.dora_scale(target)

    def _dropped(self, target: str, x: mx.array) -> mx.array:
        kept = mx.random.bernoulli(1 - self.probability, x.shape, key=self.keys[target])
        return mx.where(kept, x / (1 - self.probability), 0).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class TrainingLora:
    """`adapter` without dropout, on a GPU. Targets that it does not serve are computed as `adapter` does."""

    adapter: SingleLora

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        return self.adapter.apply(target, x, y)

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        return self.adapter.apply_experts(target, x, y, routing)

    def dora_scale(self, target: str) -> mx.array | None:
        return self.adapter.dora_scale(target)

    def serves(self, targets: Sequence[str], linears: Sequence[nn.Module]) -> bool:
        """Whether it adapts all `targets` of one input by products alone, in the base's own type."""
        a_IK = self._shared_a(targets)
        return (
            a_IK is not None
            and self.adapter.dora_scale_O.keys().isdisjoint(targets)
            and all(type(linear) in SERVED and floating_type(linear) == a_IK.dtype for linear in linears)
        )

    def outputs(self, targets: Sequence[str], linears: Sequence[nn.Module], x: mx.array) -> list[mx.array]:
        """The outputs of `targets`, which it serves and whose layers are `linears`, for their input `x` (..., I)."""
        a_IK = self._shared_a(targets)
        assert a_IK is not None
        is_narrow = all(linear.weight.shape[0] <= linear.weight.shape[1] for linear in linears)
        multiply = _chained if is_narrow and len(linears) > 1 else _separate
        hidden_MK, *products = multiply(x.flatten(0, -2), a_IK, linears)
        return [
            mx.addmm(product_MO, hidden_MK, self.adapter.b_RO[target]).reshape(*x.shape[:-1], -1)
            for target, product_MO in zip(targets, products, strict=True)
        ]

    def joined_output(self, targets: Sequence[str], joined: nn.Module, x: mx.array) -> mx.array:
        """The outputs of `targets`, which it serves, beside each other, as `joined` gives those of the base."""
        a_IK = self._shared_a(targets)
        assert a_IK is not None
        b_KO = mx.concatenate([self.adapter.b_RO[target] for target in targets], axis=1)
        return _joined(x.flatten(0, -2), a_IK, b_KO, joined).reshape(*x.shape[:-1], -1)

    def _shared_a(self, targets: Sequence[str]) -> mx.array | None:
        """A of all `targets`, if B of each takes all of its columns."""
        if len(targets) == 1:
            return self.adapter.a_IR.get(targets[0]) if targets[0] not in self.adapter.joined else None
        group = self.adapter.joined.get(targets[0])
        return group.a_IK if group is not None and group.targets == tuple(targets) and group.cuts is None else None


def _chained(x_MI: mx.array, a_IK: mx.array, linears: Sequence[nn.Module]) -> list[mx.array]:
    """`x_MI` times A, and through each of the base's layers. Keeps the products as long as the gradient."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_MI: mx.array, a_IK: mx.array) -> list[mx.array]:
        return [x_MI @ a_IK, *(linear(x_MI) for linear in linears)]

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(primals: list[mx.array], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        (x_MI, a_IK), (hidden_MK, *products) = primals, cotangents
        gradient_MI = hidden_MK @ a_IK.T
        for linear, product_MO in zip(linears, products, strict=True):
            gradient_MI = mx.addmm(gradient_MI, product_MO, weights_of(linear))
        return [gradient_MI, x_MI.T @ hidden_MK]

    products: list[mx.array] = forward(x_MI, a_IK)
    return products


def _separate(x_MI: mx.array, a_IK: mx.array, linears: Sequence[nn.Module]) -> list[mx.array]:
    """The same, where only the product with A adds itself."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_MI: mx.array, a_IK: mx.array) -> list[mx.array]:
        return [x_MI @ a_IK, x_MI]

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(primals: list[mx.array], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        (x_MI, a_IK), (hidden_MK, gradient_MI) = primals, cotangents
        return [mx.addmm(gradient_MI, hidden_MK, a_IK.T), x_MI.T @ hidden_MK]

    hidden_MK, x_MI = forward(x_MI, a_IK)
    return [hidden_MK, *(linear(x_MI) for linear in linears)]


def _joined(x_MI: mx.array, a_IK: mx.array, b_KO: mx.array, joined: nn.Module) -> mx.array:
    """`joined` of `x_MI`, plus the product with A and B."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_MI: mx.array, a_IK: mx.array, b_KO: mx.array) -> list[mx.array]:
        hidden_MK = x_MI @ a_IK
        return [mx.addmm(joined(x_MI), hidden_MK, b_KO), hidden_MK]

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        (x_MI, a_IK, b_KO), gradient_MO, hidden_MK = primals, cotangents[0], outputs[1]
        pulled_MK = gradient_MO @ b_KO.T
        gradient_MI = mx.addmm(gradient_MO @ weights_of(joined), pulled_MK, a_IK.T)
        return [gradient_MI, x_MI.T @ pulled_MK, hidden_MK.T @ gradient_MO]

    output_MO: mx.array = forward(x_MI, a_IK, b_KO)[0]
    return output_MO
