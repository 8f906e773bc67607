"""The arrays of an adapter as one vector: what is done to all of them alike is then one operation instead of hundreds.

An adapter of rank 16 on all linear layers of a 32-layer model has 448 arrays; on a GPU, starting a kernel for each of
them costs more than the work.
"""

import math
from collections.abc import Mapping
from itertools import accumulate
from math import prod

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten, tree_unflatten

from parallm.errors import CheckpointError
from parallm.learner.settings import LearnerSettings

Arrays = dict[str, mx.array]


class ParameterLayout:
    """Where each array lies: in the order of the names that it is made with."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._cuts = list(accumulate(prod(shape) for shape in self._shapes.values()))[:-1]

    def join(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """(N,) float32."""
        return mx.concatenate([arrays[name].reshape(-1).astype(mx.float32) for name in self._shapes])

    def split(self, flat_N: mx.array) -> Arrays:
        """The other way round."""
        parts = mx.split(flat_N, self._cuts)
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


class AdapterOptimizer:
    """Owner of the moments. AdamW (https://arxiv.org/abs/1711.05101) with bias correction, which MLX leaves off.

    LoRA's B has a learning rate of its own, as in LoRA+ (https://arxiv.org/abs/2402.12354). Arrays are one vector here,
    B before all others.
    """

    def __init__(self, settings: LearnerSettings, total_steps: int, arrays: Mapping[str, mx.array]) -> None:
        self._settings = settings
        self._total_steps = total_steps
        ordered = sorted(arrays, key=lambda name: (not name.endswith(".lora_b"), name))
        self.layout = ParameterLayout({name: arrays[name].shape for name in ordered})
        sizes = {True: 0, False: 0}
        for name in ordered:
            sizes[name.endswith(".lora_b")] += arrays[name].size
        self._num_b = sizes[True]
        self._adamws = {group: _adamw(settings) for group in ("b", "others")}
        for adamw, size in zip(self._adamws.values(), sizes.values(), strict=True):
            adamw.init({"all": mx.zeros((size,))})

    def compute_step(self, parameters_N: mx.array, gradient_N: mx.array, step: int) -> tuple[mx.array, Arrays]:
        """New numbers, and the state that goes with them (see `restore`). Nothing is evaluated, nothing is changed.

        `step` counts from 0 and sets the learning rate. `parameters_N` are the arrays in `layout`, `gradient_N` is their
        gradient.
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
        """Everything that the next step depends on, by flat names."""
        return {
            f"{group}.{name}": array
            for group, adamw in self._adamws.items()
            for name, array in tree_flatten(adamw.state)
        }

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Go on from what `state` has returned. Raises CheckpointError unless it is of arrays of the same sizes."""
        saved, own = ({name: array.shape for name, array in each.items()} for each in (state, self.state()))
        if differing := sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name)):
            name = differing[0]
            raise CheckpointError(
                f"the optimizer's state does not fit the adapter: {name} is {saved.get(name)} in the checkpoint, "
                f"and {own.get(name)} here"
            )
        for group, adamw in self._adamws.items():
            prefix = f"{group}."
            of_group = [(name.removeprefix(prefix), a) for name, a in state.items() if name.startswith(prefix)]
            adamw.state = tree_unflatten(of_group)


def _adamw(settings: LearnerSettings) -> mlx.optimizers.AdamW:
    return mlx.optimizers.AdamW(
        learning_rate=settings.learning_rate,
        betas=list(settings.betas),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        bias_correction=True,
    )


def learning_rate(settings: LearnerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant, or a cosine that ends at zero after `total_steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_gradient_norm(gradient_N: mx.array, norm: mx.array, most: float) -> mx.array:
    """The gradient, of that `norm`, scaled down so that its norm is at most `most`."""
    return gradient_N * mx.minimum(1, most / norm)
