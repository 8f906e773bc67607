"""The adapter as a forward multiplies by it, and the way back from gradients of that to gradients of its arrays.

Rounding, scaling and joining an adapter's arrays takes dozens of small kernels a layer, as many again backward: 3% of
an 8B model's update if each pass does it. So passes are differentiated with respect to what they multiply by, and the
sum of their gradients goes back through scaling and joining once for each update, in float32.

Axis: N numbers of all factors.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import mlx.core as mx

from parallm.learner.flat import Layout
from parallm.model.adapter import Adapter
from parallm.model.cuda import on_cuda
from parallm.model.dora import scaling_of
from parallm.model.lora import OneAdapter, Scaling, one_adapter
from parallm.model.shared_model import SharedModel


class Factors:
    """Those of one version, made once for each update."""

    def __init__(self, adapter: Adapter, model: SharedModel) -> None:
        self._arrays = dict(adapter.arrays)
        self._scaling = scaling_of(adapter, model)
        self._widens = on_cuda() and adapter.dropout == 0
        self.view = self._view(self._arrays, self._scaling)
        if not on_cuda():  # there the first pass computes them on its way; lanes would wait for each other at each one
            mx.eval(self.view.arrays())

    def join(self, gradients: Sequence[mx.array]) -> mx.array:
        """Gradients of `view.arrays()` as one vector, (N,) float32."""
        alike = [list(group) for _, group in groupby(gradients, key=lambda one: one.dtype)]  # or each would be cast
        flat = [mx.concatenate([one.reshape(-1) for one in group]).astype(mx.float32) for group in alike]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat)

    def pull_back(self, gradient_N: mx.array, layout: Layout) -> mx.array:
        """The gradient of the adapter's arrays in `layout`, from that of the factors."""
        shapes = [array.shape for array in self.view.arrays()]
        cuts = list(accumulate(array.size for array in self.view.arrays()))[:-1]
        cotangents = [part.reshape(shape) for part, shape in zip(mx.split(gradient_N, cuts), shapes, strict=True)]
        exact = replace(self._scaling, dtype=mx.float32)
        _, gradients = mx.vjp(
            lambda *arrays: self._view(dict(zip(self._arrays, arrays, strict=True)), exact).arrays(),
            list(self._arrays.values()),
            cotangents,
        )
        return layout.join(dict(zip(self._arrays, gradients, strict=True)))

    def _view(self, arrays: dict[str, mx.array], scaling: Scaling) -> OneAdapter:
        return one_adapter(arrays, scaling, widens=self._widens)
