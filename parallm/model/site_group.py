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

from parallm.model.activations import Half, swiglu_of_halves
from parallm.model.cuda import VECTOR_BYTES
from parallm.model.lora import LoraLinear, View
from parallm.model.origins import remember
from parallm.model.row_lora import GroupFactors, Products, RowAdapters, RowProducts, shrunk
from parallm.model.skinny_product import fits, skinny_product
from parallm.model.summand import Summand
from parallm.model.trained_lora import TrainedAdapter

ARRAYS = ("weight", "scales", "biases", "bias")
"""Of linear layers, quantized or not; the first axis of each is the output."""


class SiteGroup:
    """What the sites of a group share. Device thread only, one forward at a time."""

    def __init__(self, layers: Sequence[LoraLinear], joined: nn.Module) -> None:
        """`joined` is the linear layer with the outputs of `layers` beside each other."""
        self.sites = tuple(layer.site for layer in layers)
        self._widths = [layer.linear.weight.shape[0] for layer in layers]
        self._cuts = [sum(self._widths[:count]) for count in range(1, len(layers))]
        self._joined = joined
        self._linears = [layer.linear for layer in layers]
        self._is_gated = False  # whether somebody has asked for SwiGLU of the outputs, as those do who always will
        self._x: mx.array | None = None  # the input that the outputs are of; nothing is kept when all are fetched
        self._outputs: dict[str, mx.array] = {}

    def serves(self, view: View | None) -> bool:
        """Whether this is how to compute `view`."""
        if isinstance(view, TrainedAdapter):
            return view.serves(self.sites, self._linears)
        return view is None or isinstance(view, RowAdapters)

    def output(self, site: str, x: mx.array, view: View | None) -> mx.array:
        """`site`'s output (B, T, O) for `x` (B, T, I), the product of the rows' adapters added."""
        if self._x is not x or site not in self._outputs:
            self._x = x
            self._outputs = dict(zip(self.sites, self._all(x, view), strict=True))
        output = self._outputs.pop(site)
        if not self._outputs:
            self._x = None
        return output

    def _all(self, x: mx.array, view: View | None) -> list[mx.array]:
        if isinstance(view, TrainedAdapter):
            return self._trained(x, view)
        factors = view.of_group(self.sites) if isinstance(view, RowAdapters) else None
        y, y_SBTO, hidden = self._product(x, factors)
        lora = None
        if factors is not None and isinstance(view, RowAdapters):
            hidden = shrunk(x, factors, view.order_B2) if hidden is None else hidden
            lora = RowProducts(factors=factors, order_B2=view.order_B2, hidden_PBTK=hidden)
        products = Products(y_SBTO, x.dtype, self._widths, lora)
        if y is None or lora is not None:
            if len(self.sites) == 1:
                return [Summand(products.apart()[0], products.added_to)]
            return self._halves(products.apart(), products.gated)
        if len(self.sites) == 1:
            return [y]
        # What computes with one token of each row reads parts where they are; else copies save others' copies
        parts = products.apart() if x.shape[1] > 1 else mx.split(y, self._cuts, axis=-1)
        return self._halves(parts, partial(swiglu_of_halves, y))

    def _product(self, x: mx.array, factors: GroupFactors | None) -> tuple[mx.array | None, mx.array, mx.array | None]:
        """The base's outputs (B, T, O), if they are whole, and as parts (S, B, T, O); what `shrunk` would give, if that
        is known already."""
        if not fits(x, self._joined):
            y = self._joined(x)
            return y, y[None], None
        y_SBTO, hidden = skinny_product(x, self._joined, factors, is_whole=len(self.sites) > 1)
        return mx.squeeze(y_SBTO, 0) if y_SBTO.shape[0] == 1 else None, y_SBTO, hidden

    def _trained(self, x: mx.array, view: TrainedAdapter) -> list[mx.array]:
        if not self._is_gated:  # whoever reads them by themselves would have to copy them
            return view.outputs(self.sites, self._linears, x)
        y = view.joined_output(self.sites, self._joined, x)
        return self._halves(mx.split(y, self._cuts, axis=-1), partial(swiglu_of_halves, y))

    def _halves(self, parts: list[mx.array], gated: Callable[[], mx.array]) -> list[mx.array]:
        """`parts`; of two that are alike SwiGLU is `gated`."""

        def taken() -> mx.array:
            self._is_gated = True
            return gated()

        if len(parts) == 2 and self._widths[0] == self._widths[1]:
            for place, part in enumerate(parts):
                remember(part, Half(gated=taken, place=place))
        return parts


def form_groups(base: nn.Module, called: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Join the sites that were `called` with one input, where they are alike. Returns the groups, one of each site."""
    layers = {module.site: module for module in base.modules() if isinstance(module, LoraLinear)}
    together = [sites for sites in called if _are_alike([layers[site] for site in sites])]
    joined = {site for sites in together for site in sites}
    groups = [*together, *((site,) for site in layers if site not in joined)]
    groups = [sites for sites in groups if _is_aligned([layers[site] for site in sites])]
    for sites in groups:
        members = [layers[site] for site in sites]
        group = SiteGroup(members, members[0].linear if len(members) == 1 else _join(members))
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
