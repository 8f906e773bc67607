"""AdamW over an adapter's arrays, its learning-rate schedule, and gradient clipping."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten

from parallm.errors import CheckpointError
from parallm.learner.settings import LearnerSettings

Arrays = dict[str, mx.array]


class AdapterOptimizer:
    """Owner of the moments. AdamW (https://arxiv.org/abs/1711.05101) with bias correction, which MLX leaves off."""

    def __init__(self, settings: LearnerSettings, total_steps: int, arrays: Arrays) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._adamw = mlx.optimizers.AdamW(
            learning_rate=settings.learning_rate,
            betas=list(settings.betas),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            bias_correction=True,
        )
        self._adamw.init(arrays)

    def apply(self, arrays: Arrays, gradients: Arrays, step: int) -> Arrays:
        """New arrays, evaluated; the old ones stay as they are. `step` counts from 0 and sets the learning rate."""
        self._adamw.learning_rate = learning_rate(self._settings, step, self._total_steps)
        updated: Arrays = self._adamw.apply_gradients(gradients, arrays)
        mx.eval(updated, self._adamw.state)
        return updated

    def state(self) -> Arrays:
        """Everything that the next step depends on, by flat names."""
        return dict(tree_flatten(self._adamw.state))

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Go on from what `state` has returned. Raises CheckpointError unless it is of the same arrays."""
        if differing := sorted(state.keys() ^ self.state().keys()):
            raise CheckpointError(
                f"the optimizer's state does not fit the adapter: {differing[0]} is only in one of them"
            )
        # not tree_unflatten: an adapter's names hold dots themselves, and MLX starts moments that it does not find anew
        nested: dict[str, Any] = {}
        for key, array in state.items():
            name, _, moment = key.rpartition(".")
            if name:
                nested.setdefault(name, {})[moment] = array
            else:
                nested[key] = array
        self._adamw.state = nested


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
