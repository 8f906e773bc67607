"""AdamW over an adapter's arrays, its learning-rate schedule, and gradient clipping."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten

from parallm.errors import CheckpointError
from parallm.learner.settings import LearnerSettings

Arrays = dict[str, mx.array]


class AdapterOptimizer:
    """Owner of the moments. AdamW (https://arxiv.org/abs/1711.05101) with bias correction, which MLX leaves off.

    LoRA's B has a learning rate of its own, as in LoRA+ (https://arxiv.org/abs/2402.12354).
    """

    def __init__(self, settings: LearnerSettings, total_steps: int, arrays: Arrays) -> None:
        self._settings = settings
        self._total_steps = total_steps
        of_b = tuple(name for name in arrays if name.endswith(".lora_b"))
        self._names = of_b, tuple(name for name in arrays if not name.endswith(".lora_b"))
        self._adamws = _adamw(settings), _adamw(settings)
        for adamw, names in zip(self._adamws, self._names, strict=True):
            adamw.init({name: arrays[name] for name in names})

    def apply(self, arrays: Arrays, gradients: Arrays, step: int) -> Arrays:
        """New arrays, evaluated; the old ones stay as they are. `step` counts from 0 and sets the learning rate."""
        rate = learning_rate(self._settings, step, self._total_steps)
        updated: Arrays = {}
        for adamw, names, ratio in zip(self._adamws, self._names, (self._settings.lora_plus_ratio, 1), strict=True):
            adamw.learning_rate = rate * ratio
            chosen = {name: gradients[name] for name in names}
            updated |= adamw.apply_gradients(chosen, {name: arrays[name] for name in names})
        mx.eval(updated, [adamw.state for adamw in self._adamws])
        return updated

    def state(self) -> Arrays:
        """Everything that the next step depends on, by flat names. Both groups count the same steps."""
        of_b, others = (dict(tree_flatten(adamw.state)) for adamw in self._adamws)
        return of_b | others

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Go on from what `state` has returned. Raises CheckpointError unless it is of the same arrays."""
        if differing := sorted(state.keys() ^ self.state().keys()):
            raise CheckpointError(
                f"the optimizer's state does not fit the adapter: {differing[0]} is only in one of them"
            )
        for adamw, names in zip(self._adamws, self._names, strict=True):
            adamw.state = _nested(state, names)


def _adamw(settings: LearnerSettings) -> mlx.optimizers.AdamW:
    return mlx.optimizers.AdamW(
        learning_rate=settings.learning_rate,
        betas=list(settings.betas),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        bias_correction=True,
    )


def _nested(state: Mapping[str, mx.array], names: Collection[str]) -> dict[str, Any]:
    """What MLX wants: scalars, and the moments of each of `names`."""
    # not tree_unflatten: an adapter's names hold dots themselves, and MLX starts moments that it does not find anew
    nested: dict[str, Any] = {}
    for key, array in state.items():
        name, _, moment = key.rpartition(".")
        if not name:
            nested[key] = array
        elif name in names:
            nested.setdefault(name, {})[moment] = array
    return nested


def learning_rate(settings: LearnerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant, or a cosine that ends at zero after `total_steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def gradient_norm(gradients: Arrays) -> mx.array:
    """Square root of the sum of all squares, float32 scalar. Not finite if any gradient is not."""
    return mx.sqrt(sum((gradient.astype(mx.float32) ** 2).sum() for gradient in gradients.values()))


def scaled_to_norm(gradients: Arrays, norm: float, most: float) -> Arrays:
    """Gradients scaled down so that their norm is at most `most`; `norm` must be finite."""
    if norm <= most:
        return gradients
    return {name: gradient * (most / norm) for name, gradient in gradients.items()}
