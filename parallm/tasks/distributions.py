"""Distributions over actions, from a policy net's outputs: samples by seeds, modes, log-probs and entropies.

NumPy in float64, row by row: a row's action depends on its own numbers and its own seed alone.
Axes: N rows, A parts of an action, L logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parallm.errors import InvalidRequest
from parallm.model.policy_nets.config import Box, Discrete, MultiBinary, PolicyConfig
from parallm.seeds import mix_all
from parallm.tensors import Array, Arrays

LOG_2PI = math.log(2 * math.pi)
Uniforms = Callable[[int], Array]
"""Returns that many numbers between 0 and 1 for each row, (N, count)."""


class Distribution(Protocol):
    def sample(self, uniforms: Uniforms) -> Array:
        """Return a sample of each row, in the form that `log_prob` takes."""

    def mode(self) -> Array:
        """Return the likeliest action of each row; of a Gaussian, squashed or not, what its mean becomes."""

    def log_prob(self, sample: Array) -> Array:
        """Return the log-prob (N,) of the action that a sample becomes, summed over its parts."""

    def entropy(self) -> Array:
        """Return the entropy (N,) in nats. Raises InvalidRequest where there is no closed form."""

    def action(self, sample: Array) -> Array:
        """Return the actions of samples, in the form of the space."""

    def clipped(self, sample: Array) -> Array | None:
        """Return the actions within the bounds of the space; None if all are."""


def distribution(config: PolicyConfig, outputs: Arrays) -> Distribution:
    """Return the distributions of all rows of a net's outputs."""
    space = config.action_space
    if isinstance(space, Box):
        mean_NA, log_std_NA = outputs["mean"].astype(np.float64), outputs["log_std"].astype(np.float64)
        return (SquashedGaussian if config.squash else Gaussian)(mean_NA, log_std_NA, space)
    logits_NL = outputs["logits"].astype(np.float64)
    if isinstance(space, MultiBinary):
        return Bernoulli(logits_NL)
    return Categorical(logits_NL, space.nvec, is_single=isinstance(space, Discrete))


def uniforms_of(seeds_N: Array) -> Uniforms:
    """Return numbers strictly between 0 and 1 that follow from each row's seed (uint64)."""

    def uniforms(count: int) -> Array:
        parts = [mix_all(seeds_N, np.full(len(seeds_N), index, np.uint64)) for index in range(count)]
        return (np.stack(parts, axis=1) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54

    return uniforms


@dataclass(frozen=True, slots=True)
class Categorical:
    """One choice of `nvec[i]` for each part."""

    logits_NL: Array
    nvec: tuple[int, ...]
    is_single: bool
    """Whether an action is a number rather than a list of one."""

    def sample(self, uniforms: Uniforms) -> Array:
        u_NA = uniforms(len(self.nvec))
        parts = [_chosen(log_probs_NL, u_NA[:, index]) for index, log_probs_NL in enumerate(self._log_probs())]
        return np.stack(parts, axis=1)

    def mode(self) -> Array:
        return np.stack([log_probs_NL.argmax(axis=1) for log_probs_NL in self._log_probs()], axis=1)

    def log_prob(self, sample: Array) -> Array:
        parts = [
            np.take_along_axis(log_probs_NL, sample[:, index : index + 1], axis=1)[:, 0]
            for index, log_probs_NL in enumerate(self._log_probs())
        ]
        return np.sum(parts, axis=0)

    def entropy(self) -> Array:
        return np.sum([-(np.exp(parts_NL) * parts_NL).sum(axis=1) for parts_NL in self._log_probs()], axis=0)

    def action(self, sample: Array) -> Array:
        return sample[:, 0] if self.is_single else sample

    def clipped(self, sample: Array) -> Array | None:
        return None

    def _log_probs(self) -> list[Array]:
        parts = np.split(self.logits_NL, np.cumsum(self.nvec)[:-1], axis=1)
        shifted = [part_NL - part_NL.max(axis=1, keepdims=True) for part_NL in parts]
        return [part_NL - np.log(np.exp(part_NL).sum(axis=1, keepdims=True)) for part_NL in shifted]


def _chosen(log_probs_NL: Array, u_N: Array) -> Array:
    """Return the index whose part of the cumulated probabilities holds the uniform number."""
    cumulated_NL = np.exp(log_probs_NL).cumsum(axis=1)
    index_N = (cumulated_NL <= u_N[:, None] * cumulated_NL[:, -1:]).sum(axis=1)
    return np.minimum(index_N, log_probs_NL.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """A switch for each logit."""

    logits_NA: Array

    def sample(self, uniforms: Uniforms) -> Array:
        u_NA = uniforms(self.logits_NA.shape[1])
        return (np.log(u_NA) - np.log1p(-u_NA) < self.logits_NA).astype(np.int8)

    def mode(self) -> Array:
        return (self.logits_NA > 0).astype(np.int8)

    def log_prob(self, sample: Array) -> Array:
        return -np.logaddexp(0.0, np.where(sample > 0, -self.logits_NA, self.logits_NA)).sum(axis=1)

    def entropy(self) -> Array:
        on_NA = np.exp(-np.logaddexp(0.0, -self.logits_NA))
        return (np.logaddexp(0.0, self.logits_NA) - on_NA * self.logits_NA).sum(axis=1)

    def action(self, sample: Array) -> Array:
        return sample

    def clipped(self, sample: Array) -> Array | None:
        return None


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Independent normal distributions. Samples are not clipped, since log-probs are theirs."""

    mean_NA: Array
    log_std_NA: Array
    space: Box

    def sample(self, uniforms: Uniforms) -> Array:
        size = self.mean_NA.shape[1]
        u_NA = uniforms(2 * size)
        # Box and Muller, 1958: two uniform numbers make a normal one
        noise_NA = np.sqrt(-2 * np.log(u_NA[:, :size])) * np.cos(2 * np.pi * u_NA[:, size:])
        return _as_sent(self.mean_NA + np.exp(self.log_std_NA) * noise_NA)

    def mode(self) -> Array:
        return _as_sent(self.mean_NA)

    def log_prob(self, sample: Array) -> Array:
        noise_NA = (sample - self.mean_NA) * np.exp(-self.log_std_NA)
        return (-0.5 * noise_NA**2 - self.log_std_NA - 0.5 * LOG_2PI).sum(axis=1)

    def entropy(self) -> Array:
        return (self.log_std_NA + 0.5 * (1 + LOG_2PI)).sum(axis=1)

    def action(self, sample: Array) -> Array:
        return self._shaped(sample)

    def clipped(self, sample: Array) -> Array | None:
        low, high = self.space.bounds
        return self._shaped(np.clip(sample, low, high)) if low else None

    def _shaped(self, values_NA: Array) -> Array:
        return values_NA.reshape(len(values_NA), *self.space.shape).astype(np.float32)


class SquashedGaussian(Gaussian):
    """The tanh of normal samples, scaled from (-1, 1) to the box; the log-prob is that of the scaled action.

    With a = c + s tanh(u): log p(a) = log p(u) - sum(log s + log(1 - tanh(u)^2)), where the last term is
    2 (log 2 - u - softplus(-2u)) (https://arxiv.org/abs/1801.01290, appendix C).
    """

    __slots__ = ()

    def log_prob(self, sample: Array) -> Array:
        slope_NA = 2 * (math.log(2) - sample - np.logaddexp(0.0, -2 * sample)) + np.log(self._scale_and_center()[0])
        return Gaussian.log_prob(self, sample) - slope_NA.sum(axis=1)

    def entropy(self) -> Array:
        raise InvalidRequest(
            "the entropy of a squashed Gaussian has no closed form; leave it out, and take the mean of "
            "-action_log_probs",
            "return",
        )

    def action(self, sample: Array) -> Array:
        scale_A, center_A = self._scale_and_center()
        return self._shaped(center_A + scale_A * np.tanh(sample))

    def clipped(self, sample: Array) -> Array | None:
        return None

    def _scale_and_center(self) -> tuple[Array, Array]:
        low, high = self.space.bounds
        low_A, high_A = np.array(low or (-1.0,)), np.array(high or (1.0,))
        return (high_A - low_A) / 2, (high_A + low_A) / 2


def _as_sent(values: Array) -> Array:
    """Return the numbers that a client gets, as float64, so that log-probs are of these."""
    return values.astype(np.float32).astype(np.float64)
