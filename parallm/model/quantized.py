"""How the base's weights are kept: their floating type, and whether quantized ones stay packed. Called by `load.py`.

MLX's product for CPUs unpacks weights anew for every row: 64 rows take about 30 times as long as unpacked weights and a
BLAS do. So on a CPU weights are unpacked first, all of them once where memory allows it, else those of a layer for each
product. On CUDA that pays for products of many rows, and for the gradient of an input; few rows with weights of 4 bits
have a kernel of their own (`kernels/quantized_gemm.py`). Experts that stay packed are left to MLX's own product.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model

from parallm.device.memory import free_memory
from parallm.errors import ModelError
from parallm.model.kernels import quantized_gemm, unpack
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.unpack import unpacked

UNPACKED_SHARE = 0.5
"""Share of the free memory that unpacked weights may take with `auto`."""

MANY_ROWS = 256
"""On CUDA, where MLX unpacks: with fewer, that costs more than it saves. An H200 multiplies 256 rows with packed
weights of 4,096 x 28,672 in 0.52 ms by MLX's product, and in 0.34 with unpacked ones; 128 rows in 0.26 and 0.36."""
MANY_ROWS_OF_KERNEL = quantized_gemm.MAX_ROWS + 1
"""The same where our kernel unpacks: there 128 rows take 0.15 ms. Fewer may pay with 8 bits, which is not measured."""

FLOATS = ("float32", "float16", "bfloat16")

_kept: ContextVar[dict[int, mx.array] | None] = ContextVar("kept", default=None)
"""The unpacked weights of layers, by `id`, inside of `kept_unpacked`."""

Storage = Literal["auto", "packed", "unpacked"]


def cast(base: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the floating arrays of `base`, except those that mlx-lm never casts. Evaluates nothing.

    These are named by the model's `cast_predicate`, such as A_log of gated delta layers and the correction biases of
    routers. In fewer bits they give other log-probs and choose other experts than mlx-lm's own forward.
    """
    is_cast: Callable[[str], bool] = getattr(base, "cast_predicate", lambda _: True)

    def changed(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and is_cast(name) else array

    base.update(tree_map_with_path(changed, base.parameters()))


def stored_dtype(base: nn.Module) -> mx.Dtype:
    """The floating type of most numbers of `base`."""
    sizes: Counter[mx.Dtype] = Counter()
    for _, array in tree_flatten(base.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]


def choose_dtype(name: str, base: nn.Module, config: Mapping[str, Any]) -> mx.Dtype:
    """The type that `model.dtype` asks for; `auto` is float32 on a CPU and the stored type elsewhere, or what `config`
    names where only the scales of packed weights are float32: MLX multiplies in the type of the scales."""
    if name != "auto":
        return getattr(mx, name)  # the settings allow only names of dtypes
    if _on_cpu():
        return mx.float32  # bfloat16 products run at 7 GFLOP/s on a CPU, float32 ones at 200
    stored = stored_dtype(base)
    if stored == mx.float32 and unpacked_bytes(base, stored) and (named := config.get("dtype")) in FLOATS:
        return getattr(mx, named)
    return stored


def arrange_quantized(base: nn.Module, storage: Storage, dtype: mx.Dtype) -> None:
    """Keep the quantized layers of `base` as `storage` says. Changes `base`; evaluates nothing.

    Raises ModelError for another choice than `auto` where nothing is quantized.
    """
    if storage != "auto" and not unpacked_bytes(base, dtype):
        raise ModelError(f"model.quantized={storage}: no layer of this model is quantized; leave the setting out")
    if _unpacks(base, storage, dtype):
        dequantize_model(base)
        cast(base, dtype)  # formats whose scales are no floats are unpacked into bfloat16
    elif _on_cpu() or on_cuda():
        layers = [(name, _unpacking(module)) for name, module in base.named_modules() if type(module) in UNPACKING]
        base.update_modules(tree_unflatten(layers))


def check_experts(base: nn.Module, storage: Storage, dtype: mx.Dtype, model_type: str) -> None:
    """Raise ModelError for a mixture whose experts MLX cannot multiply in `dtype` here. Evaluates nothing."""
    if dtype == mx.float32 or not _on_cpu():
        return
    refused = (SwitchLinear, QuantizedSwitchLinear) if _unpacks(base, storage, dtype) else SwitchLinear
    if any(isinstance(module, refused) for module in base.modules()):
        name = str(dtype).removeprefix("mlx.core.")
        raise ModelError(
            f"model.dtype={name}: {model_type} has experts, which MLX multiplies only in float32 on a CPU; "
            "set model.dtype=float32"
        )


def wants_tf32(base: nn.Module, dtype: mx.Dtype) -> bool | None:
    """What `choose_tf32` is to do for a model that computes in `dtype`."""
    if dtype == mx.float32:
        return False
    return True if any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in base.modules()) else None


def unpacked_bytes(base: nn.Module, dtype: mx.Dtype) -> int:
    """Size of the unpacked weights of the quantized layers."""
    packed = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
    layers = [module for module in base.modules() if isinstance(module, packed)]
    return sum(layer.weight.size * 32 // layer.bits for layer in layers) * dtype.size


class UnpackingLinear(nn.QuantizedLinear):
    """A quantized linear layer that unpacks its weights for each product, forward and backward; on CUDA for products
    of many rows, and in registers for those of few."""

    def __call__(self, x: mx.array) -> mx.array:
        return _product(self, x) if _is_ours(self, x) else _of_rows(super().__call__, x)


class UnpackingEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding that does so where it is the model's head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x) if _is_ours(self, x) else _of_rows(super().as_linear, x)


UNPACKING: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: UnpackingLinear,
    nn.QuantizedEmbedding: UnpackingEmbedding,
}


@contextmanager
def kept_unpacked() -> Iterator[None]:
    """On CUDA let all products of a layer inside the block share its unpacked weights, gradients included.

    They live as long as the graph: for the head, which multiplies many chunks of tokens.
    """
    outer = _kept.get()
    token = _kept.set({} if outer is None else outer)
    try:
        yield
    finally:
        _kept.reset(token)


def floating_type(linear: nn.Module) -> mx.Dtype:
    """The type of a linear layer's weights, once they are unpacked."""
    dtype: mx.Dtype = linear.get("scales", linear.weight).dtype
    return dtype


def weights_of(linear: nn.Module) -> mx.array:
    """The weights of a linear layer (O, I), unpacked now if they are packed."""
    weights_OI: mx.array = unpacked(linear, floating_type(linear)) if "scales" in linear else linear.weight
    return weights_OI


def _unpacks(base: nn.Module, storage: Storage, dtype: mx.Dtype) -> bool:
    """Whether the weights of quantized layers are written out; true also where there are none to keep packed."""
    fits = unpacked_bytes(base, dtype) <= UNPACKED_SHARE * free_memory()
    return storage == "unpacked" or (storage == "auto" and _on_cpu() and fits)


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def _is_ours(layer: nn.Module, x: mx.array) -> bool:
    """Whether `_product` multiplies: by a kernel, or because it pays to unpack the weights."""
    many = MANY_ROWS_OF_KERNEL if unpack.fits(layer, x.dtype) else MANY_ROWS
    return not on_cuda() or x.size >= many * x.shape[-1] or quantized_gemm.fits(x, layer)


def _of_rows(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """The packed product of `x` (..., inputs) as one matrix: MLX would read the weights again for each row of a
    decode step, whose input is (rows, 1, inputs)."""
    return product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def _unpacking(layer: nn.Module) -> nn.Module:
    """The same layer with the same arrays; its own constructor would quantize random ones first."""
    own = copy.copy(layer)
    own.__class__ = UNPACKING[type(layer)]
    return own


def _product(layer: nn.Module, x: mx.array) -> mx.array:
    """The output of a plain linear layer with the unpacked weights for `x` (..., inputs)."""
    kept = _kept.get()
    if kept is not None and on_cuda() and not quantized_gemm.fits(x, layer):
        if id(layer) not in kept:
            kept[id(layer)] = unpacked(layer, x.dtype)
        weight_OI = kept[id(layer)]
        return mx.addmm(layer.bias, x, weight_OI.T) if "bias" in layer else x @ weight_OI.T

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x: mx.array) -> mx.array:
        if quantized_gemm.fits(x, layer):
            y_SBTO = quantized_gemm.quantized_gemm(x.reshape(-1, 1, x.shape[-1]), layer, is_whole=True)
            return y_SBTO.reshape(*x.shape[:-1], -1)
        weight_OI = unpacked(layer, x.dtype)
        return mx.addmm(layer.bias, x, weight_OI.T) if "bias" in layer else x @ weight_OI.T

    # unpacked again: else all weights would be kept from the forward until the backward
    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
        return cotangent @ unpacked(layer, cotangent.dtype)

    y: mx.array = forward(x)
    return y
