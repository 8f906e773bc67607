"""LoRA sites in training on a GPU: gradients of one input are added by the products that make them.

A site's input gets a gradient from the base's product and one from A. MLX adds them with a kernel, as it does those of
several sites. Here the product with A adds itself to the others. Queries, keys and values each add themselves to the
one before; gate and up, whose SwiGLU reads them side by side, are one product forward and backward.

Axes: M tokens, I input, O output, K columns of all A that one input is multiplied by.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from parallm.model.lora import OneAdapter


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """The view of one adapter while it is trained. Sites that it does not serve are computed as `adapter` does."""

    adapter: OneAdapter

    def added(self, site: str, x: mx.array, y: mx.array) -> mx.array:
        return self.adapter.added(site, x, y)

    def stretch(self, site: str) -> mx.array | None:
        return self.adapter.stretch(site)

    def serves(self, sites: Sequence[str], linears: Sequence[nn.Module]) -> bool:
        """Whether it adapts all `sites` of one input by products alone, in the base's own type."""
        a_IK = self._shared_a(sites)
        return (
            a_IK is not None
            and self.adapter.stretch_O.keys().isdisjoint(sites)
            and all(type(linear) is nn.Linear and linear.weight.dtype == a_IK.dtype for linear in linears)
        )

    def outputs(self, sites: Sequence[str], linears: Sequence[nn.Linear], x: mx.array) -> list[mx.array]:
        """Of `linears`, which are `sites` that it serves, for their input `x` (..., I)."""
        a_IK = self._shared_a(sites)
        assert a_IK is not None
        is_narrow = all(linear.weight.shape[0] <= linear.weight.shape[1] for linear in linears)
        products_of = _chained if is_narrow and len(linears) > 1 else _apart
        hidden_MK, *products = products_of(x.flatten(0, -2), a_IK, linears)
        return [
            mx.addmm(product_MO, hidden_MK, self.adapter.b_RO[site]).reshape(*x.shape[:-1], -1)
            for site, product_MO in zip(sites, products, strict=True)
        ]

    def joined_output(self, sites: Sequence[str], joined: nn.Linear, x: mx.array) -> mx.array:
        """The outputs of `sites`, which it serves, beside each other, as `joined` gives those of the base."""
        a_IK = self._shared_a(sites)
        assert a_IK is not None
        b_KO = mx.concatenate([self.adapter.b_RO[site] for site in sites], axis=1)
        return _together(x.flatten(0, -2), a_IK, b_KO, joined).reshape(*x.shape[:-1], -1)

    def _shared_a(self, sites: Sequence[str]) -> mx.array | None:
        """A of all `sites`, if B of each takes all of its columns."""
        if len(sites) == 1:
            return self.adapter.a_IR.get(sites[0]) if sites[0] not in self.adapter.joined else None
        group = self.adapter.joined.get(sites[0])
        return group.a_IK if group is not None and group.sites == tuple(sites) and group.cuts is None else None


def _chained(x_MI: mx.array, a_IK: mx.array, linears: Sequence[nn.Linear]) -> list[mx.array]:
    """`x_MI` times A, and through each of the base's layers. Keeps what these give for as long as the gradient."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_MI: mx.array, a_IK: mx.array) -> list[mx.array]:
        return [x_MI @ a_IK, *(linear(x_MI) for linear in linears)]

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(primals: list[mx.array], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        (x_MI, a_IK), (hidden_MK, *products) = primals, cotangents
        gradient_MI = hidden_MK @ a_IK.T
        for linear, product_MO in zip(linears, products, strict=True):
            gradient_MI = mx.addmm(gradient_MI, product_MO, linear.weight)
        return [gradient_MI, x_MI.T @ hidden_MK]

    found: list[mx.array] = forward(x_MI, a_IK)
    return found


def _apart(x_MI: mx.array, a_IK: mx.array, linears: Sequence[nn.Linear]) -> list[mx.array]:
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


def _together(x_MI: mx.array, a_IK: mx.array, b_KO: mx.array, joined: nn.Linear) -> mx.array:
    """`joined` of `x_MI`, and to it the product with A and B."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_MI: mx.array, a_IK: mx.array, b_KO: mx.array) -> list[mx.array]:
        hidden_MK = x_MI @ a_IK
        return [mx.addmm(joined(x_MI), hidden_MK, b_KO), hidden_MK]

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        (x_MI, a_IK, b_KO), gradient_MO, hidden_MK = primals, cotangents[0], outputs[1]
        pulled_MK = gradient_MO @ b_KO.T
        gradient_MI = mx.addmm(gradient_MO @ joined.weight, pulled_MK, a_IK.T)
        return [gradient_MI, x_MI.T @ pulled_MK, hidden_MK.T @ gradient_MO]

    found: list[mx.array] = forward(x_MI, a_IK, b_KO)
    return found[0]
