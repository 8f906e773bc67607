"""The floating type of a base: which one it is stored in, which one it gets, and what keeps its own."""

from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path


def cast(base: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the floating arrays of `base`, except those that mlx-lm never casts. Evaluates nothing.

    These are named by the model's `cast_predicate`, such as A_log of gated delta layers and the correction biases of
    routers. In fewer bits they give other log-probs and choose other experts than mlx-lm's own forward.
    """
    is_cast = _cast_predicate(base)

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


def choose_dtype(wanted: str, base: nn.Module) -> mx.Dtype:
    """The type that `model.dtype` asks for; `auto` is float32 on a CPU and the stored type elsewhere."""
    if wanted != "auto":
        return getattr(mx, wanted)  # the settings allow only names of dtypes
    # bfloat16 products run at 7 GFLOP/s on a CPU, float32 ones at 200
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else stored_dtype(base)


def _cast_predicate(base: nn.Module) -> Callable[[str], bool]:
    return getattr(base, "cast_predicate", lambda _: True)
