"""The order in which mlx-lm computes the chosen experts of many tokens, as LoRA needs it, and their products.

From 64 rows on `SwitchGLU` and `SwitchMLP` sort the rows of a product by expert, and hand their layers no more than
the sorted indices. Rows of several adapter versions need to know whose row each is.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers

from parallm.model.kernels import grouped_gemm
from parallm.model.patches.forward import origin_of, set_origin
from parallm.model.patches.kernel_trial import try_grouped_gemm

EXPERTS = (switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear)

_mlx_lm_sort = switch_layers._gather_sort


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedExperts:
    """Origin of expert indices (N,) in their own order."""

    tokens_N: mx.array
    """The token that each index was chosen for, counted over all rows of the forward."""
    num_tokens: int
    tiles_M4: mx.array | None = None
    """`grouped_gemm.list_tiles` of the indices, once a product has asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct:
    """Origin of a product (N, 1, O) of sorted rows with their experts, which nothing has asked for yet."""

    x_NI: mx.array
    weights_EOI: mx.array
    bias_NO: mx.array | None
    experts_N: mx.array

    def plus(self, hidden: mx.array, factors_ERO: mx.array) -> mx.array:
        """The product with that of `hidden` (N, 1, R) and the experts' factors added, in one kernel."""
        tiles_M4 = tiles_of(self.experts_N, self.weights_EOI.shape[0])
        hidden_NR = hidden.reshape(-1, hidden.shape[-1])
        y_NO = grouped_gemm.grouped_gemm_plus(
            self.x_NI, self.weights_EOI, hidden_NR, factors_ERO, self.experts_N, tiles_M4
        )
        if self.bias_NO is not None:
            y_NO = y_NO + self.bias_NO
        return y_NO.reshape(*hidden.shape[:-1], -1)


def install_experts() -> None:
    """Let mlx-lm's mixtures sort with `sort_by_expert`. Changes mlx-lm's module; safe to repeat."""
    switch_layers._gather_sort = sort_by_expert


def install_products(base: nn.Module, dtype: mx.Dtype) -> None:
    """Let the experts of `base`, which computes in `dtype`, multiply sorted rows with our kernel, where that runs and
    agrees with MLX's operations. Evaluates no weights."""
    layers = [module for module in base.modules() if type(module) in EXPERTS]
    if not layers or dtype not in grouped_gemm.DTYPES:
        return
    try_grouped_gemm(dtype)
    if not grouped_gemm.has_kernel():
        return
    for layer in layers:
        if type(layer) is not switch_layers.SwitchLinear:
            continue  # the kernel multiplies with LoRA's matrices alone
        layer.__class__ = GroupedExperts
        layer.weight = mx.contiguous(layer.weight)  # else each launch would copy a view


class GroupedExperts(switch_layers.SwitchLinear):
    """Experts whose products of sorted rows are our kernel's, as long as their weights are frozen."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        is_frozen = "weight" in self._no_grad
        if not (sorted_indices and is_frozen and grouped_gemm.fits(x, self.weight)):
            product: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return product
        rows_NI = x.reshape(-1, x.shape[-1])
        y_NO = grouped_gemm.grouped_gemm(rows_NI, self.weight, tiles_of(indices, self.num_experts))
        bias_NO = self.bias[indices] if "bias" in self else None
        if bias_NO is not None:
            y_NO = y_NO + bias_NO
        y: mx.array = y_NO.reshape(*x.shape[:-1], -1)
        set_origin(y, ExpertProduct(x_NI=rows_NI, weights_EOI=self.weight, bias_NO=bias_NO, experts_N=indices))
        return y


def tiles_of(experts_N: mx.array, num_experts: int) -> mx.array:
    """The tiles of sorted experts (`grouped_gemm.list_tiles`); the products of a layer share them."""
    origin = origin_of(experts_N)
    if isinstance(origin, SortedExperts) and origin.tiles_M4 is not None:
        return origin.tiles_M4
    tiles_M4 = grouped_gemm.list_tiles(experts_N, num_experts)
    if isinstance(origin, SortedExperts):
        set_origin(experts_N, replace(origin, tiles_M4=tiles_M4))
    return tiles_M4


def sort_by_expert(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs in the order of their experts, the experts, and the order that puts results back.

    Stands in for mlx-lm's function of the same signature; the experts know their tokens (`SortedExperts`).
    """
    sorted_x, experts_N, inverse_N = _mlx_lm_sort(x, indices)
    chosen = indices.shape[-1]
    tokens_N = mx.argsort(inverse_N) // chosen
    set_origin(experts_N, SortedExperts(tokens_N=tokens_N, num_tokens=indices.size // chosen))
    return sorted_x, experts_N, inverse_N
