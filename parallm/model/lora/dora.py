"""DoRA: the length of each output's weights is trained apart from their direction.

An output is m (W x + scale B A x) / ||W + scale B A||. The norm, over the inputs, counts as a constant in the gradient
(section 4.3 of the paper), so it is computed once per version and never in a forward.

https://arxiv.org/abs/2402.09353. Axes: O outputs, I inputs, R rank.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels.unpack import unpacked
from parallm.model.lora.linear import LoraLinear
from parallm.model.lora.single import LoraScaling
from parallm.model.shared_model import SharedModel

FLOAT16_SHIFT = 64.0
"""B of a young adapter, about the learning rate, is too small for float16's digits; A has some to give."""


def lora_scaling(adapter: Adapter, model: SharedModel) -> LoraScaling:
    """The scaling of `adapter` on this base. Evaluated; DoRA takes a pass over the weights. Raises AdapterError if the
    base's type cannot hold it."""
    scales = adapter.scales
    dtype = model.dtype if model.dtype.size == 2 else mx.float32  # beside 16 bits no activation has to be widened
    shift = FLOAT16_SHIFT if dtype == mx.float16 else 1.0
    if dtype == mx.float16:
        _check_range(adapter)
    if not adapter.is_dora:
        return LoraScaling(scales, {}, dtype, model.joined, shift)
    if model.parallel is not None:
        raise AdapterError(
            f"{adapter.name}@{adapter.version} is DoRA, which needs the whole weights of a layer; set "
            "distributed.tensor_parallel=1, or fuse it by parallm.export"
        )
    layers = _layers(model.base)
    norms: dict[str, mx.array] = {}
    for target in adapter.targets:
        a_IR, b_RO = adapter.arrays[f"{target}.lora_a"], adapter.arrays[f"{target}.lora_b"]
        norms[target] = mx.linalg.norm(_weight(layers[target]) + (a_IR @ (b_RO * scales[target])).T, axis=1)
    mx.eval(norms)
    return LoraScaling(scales, norms, dtype, model.joined, shift)


def _check_range(adapter: Adapter) -> None:
    """Raise AdapterError if float16 cannot hold an array of `adapter` with its scale: rows of several versions share
    products, in which an infinite factor would reach the others."""
    largest = mx.stack([mx.abs(array).max() for name, array in adapter.arrays.items() if name.endswith(".lora_b")])
    limit = float(mx.finfo(mx.float16).max) / FLOAT16_SHIFT
    if (reached := float(largest.max().item()) * adapter.max_scale) > limit:
        raise AdapterError(
            f"{adapter.name}@{adapter.version}: its B times its scale reaches {reached:.3g}, beside a base in float16 "
            f"at most {limit:.0f} is possible; set model.dtype=bfloat16"
        )


def initial_magnitudes(model: SharedModel) -> dict[str, mx.array]:
    """`{target}.m`, the lengths of the base's own weights: with a product of zero they change nothing. Evaluated."""
    magnitudes = {
        f"{target}.m": mx.linalg.norm(_weight(layer), axis=1) for target, layer in _layers(model.base).items()
    }
    mx.eval(magnitudes)
    return magnitudes


def _layers(base: nn.Module) -> Mapping[str, nn.Module]:
    return {module.target: module.linear for module in base.modules() if isinstance(module, LoraLinear)}


def _weight(layer: nn.Module) -> mx.array:
    """(O, I) in float32."""
    return unpacked(layer, mx.float32) if isinstance(layer, nn.QuantizedLinear) else layer.weight.astype(mx.float32)
