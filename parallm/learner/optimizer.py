"""AdamW over an adapter's arrays as one vector, its learning-rate schedule, and gradient clipping.

An adapter of rank 16 on all linear layers of a 32-layer model has 448 arrays. On a GPU, launching a kernel for each
costs more than the work, so all arrays are one vector.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten, tree_unflatten

from parallm.errors import CheckpointError
from parallm.learner.settings import LearnerSettings

Arrays = dict[str, mx.array]
JOINED_AT_ONCE = 16


def vector_of(arrays: Sequence[mx.array]) -> mx.array:
    """All numbers of arrays of one type as one vector (N,), a few arrays at a time.

    MLX's CUDA build lets each copy of a join wait for each array that was computed just before: for hundreds of arrays
    the host sorts out tens of thousands of pairs while the GPU is idle, 27 ms for 336.
    """
    parts = [array.reshape(-1) for array in arrays]
    while len(parts) > 1:
        parts = [
            mx.concatenate(parts[start : start + JOINED_AT_ONCE]) for start in range(0, len(parts), JOINED_AT_ONCE)
        ]
    return parts[0]


class ParameterLayout:
    """The position of each array in the vector, in the given order of names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._cuts = list(accumulate(prod(shape) for shape in self._shapes.values()))[:-1]

    def join(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """The vector of `arrays`, (N,) float32."""
        return vector_of([arrays[name].astype(mx.float32) for name in self._shapes])

    def split(self, flat_N: mx.array) -> Arrays:
        """The arrays of a vector."""
        parts = mx.split(flat_N, self._cuts)
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


class AdapterOptimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) with bias correction, which MLX leaves off. Owns the moments.

    LoRA's B has its own learning rate, as in LoRA+ (https://arxiv.org/abs/2402.12354), and comes first in the vector.
    """

    def __init__(self, settings: LearnerSettings, total_steps: int, arrays: Mapping[str, mx.array]) -> None:
        self._settings = settings
        self._total_steps = total_steps
        ordered = sorted(arrays, key=lambda name: (not name.endswith(".lora_b"), name))
        self.layout = ParameterLayout({name: arrays[name].shape for name in ordered})
        self._num_b = sum(array.size for name, array in arrays.items() if name.endswith(".lora_b"))
        num_others = sum(array.size for array in arrays.values()) - self._num_b
        self._adamws = {"b": _adamw(settings, self._num_b), "others": _adamw(settings, num_others)}

    def compute_step(self, parameters_N: mx.array, gradient_N: mx.array, step: int) -> tuple[mx.array, Arrays]:
        """New parameters and the optimizer state with them (see `restore`). Evaluates and changes nothing.

        `step` counts from 0 and sets the learning rate. `parameters_N` and `gradient_N` are in `layout`.
        """
        before = self.state()
        rate = learning_rate(self._settings, step, self._total_steps)
        pairs = zip(*(mx.split(flat_N, [self._num_b]) for flat_N in (parameters_N, gradient_N)), strict=True)
        updated: list[mx.array] = []
        ratios = (self._settings.lora_plus_ratio, 1)
        for adamw, ratio, (old, gradient) in zip(self._adamws.values(), ratios, pairs, strict=True):
            adamw.learning_rate = rate * ratio
            updated.append(adamw.apply_gradients({"all": gradient}, {"all": old})["all"])
        after = self.state()
        self.restore(before)
        return mx.concatenate(updated), after

    def state(self) -> Arrays:
        """Moments, step count and learning rate by flat names."""
        return {
            f"{group}.{name}": array
            for group, adamw in self._adamws.items()
            for name, array in tree_flatten(adamw.state)
        }

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Restore a result of `state`. Raises CheckpointError unless its arrays have the same shapes."""
        saved, expected = ({name: array.shape for name, array in each.items()} for each in (state, self.state()))
        if differing := sorted(
            name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name)
        ):
            name = differing[0]
            raise CheckpointError(
                f"the optimizer's state does not fit the adapter: {name} is {saved.get(name)} in the checkpoint, "
                f"and {expected.get(name)} here"
            )
        for group, adamw in self._adamws.items():
            prefix = f"{group}."
            arrays = [(name.removeprefix(prefix), a) for name, a in state.items() if name.startswith(prefix)]
            adamw.state = tree_unflatten(arrays)


def _adamw(settings: LearnerSettings, size: int) -> mlx.optimizers.AdamW:
    adamw = mlx.optimizers.AdamW(
        learning_rate=settings.learning_rate,
        betas=list(settings.betas),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        bias_correction=True,
    )
    adamw.init({"all": mx.zeros((size,))})
    return adamw


def learning_rate(settings: LearnerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant or a cosine to zero at `total_steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_gradient_norm(gradient_N: mx.array, norm: mx.array, max_norm: float) -> mx.array:
    """The gradient with this `norm`, scaled down to `max_norm` if that is smaller."""
    return gradient_N * mx.minimum(1, max_norm / norm)
