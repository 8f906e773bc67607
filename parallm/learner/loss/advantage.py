"""Rewards of a step -> the advantage of each completion. `passes.batch` calls it.

  group_mean             r - mean of its group                                   https://arxiv.org/abs/2503.20783
  group_std              (r - mean) / std, both of its group                     https://arxiv.org/abs/2402.03300
  batch_std              (r - mean of its group) / std of all rewards of the step
  rloo                   r - mean of the others of its group                     https://arxiv.org/abs/2402.14740
  reinforce_pp           r, whitened over the tokens of the step                 https://arxiv.org/abs/2501.03262
  reinforce_pp_baseline  r - mean of its group, then whitened in the same way
  max_rl                 (r - mean) / mean of its group, for rewards of 0 and 1  https://arxiv.org/abs/2602.02710
  reward                 r itself, for completions to imitate

Standard deviations divide by one less than the count, those of whitening by the count.
Axes: S completions of the step in the order of their groups, P groups of one size, G completions of each.
"""

from collections.abc import Sequence

import numpy as np

from parallm.errors import TrainingStopped
from parallm.learner.settings import Advantage

OF_STEP: tuple[Advantage, ...] = ("batch_std", "reinforce_pp", "reinforce_pp_baseline")
"""Advantages with statistics of all rewards of the step: a group of equal rewards changes those of the others."""
STANDARD_DEVIATION_EPSILON = 1e-4
MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""Advantages are float32: a larger reward counts as infinite."""


def advantages(
    kind: Advantage, rewards_of_groups: Sequence[Sequence[float]], num_tokens_S: Sequence[int]
) -> np.ndarray:
    """float32 (S,). `num_tokens_S` is the number of trained tokens of each completion.

    A reward that is not finite makes the advantages that depend on it NaN, and so the step's loss. Without a comparison
    (equal rewards, a group of one) an advantage is 0. Raises TrainingStopped for rewards below 0 with max_rl, which
    would turn its sign.
    """
    rewards_S = np.array([reward for rewards_G in rewards_of_groups for reward in rewards_G], np.float64)
    if not len(rewards_S):
        return np.zeros(0, np.float32)
    if kind in OF_STEP and not np.isfinite(rewards_S).all():
        return np.full(len(rewards_S), np.nan, np.float32)
    if kind == "reinforce_pp":
        return _whitened(rewards_S, num_tokens_S).astype(np.float32)
    advantages_S = np.zeros(len(rewards_S))
    for size, indices_PG in _by_size(rewards_of_groups).items():
        if size:
            advantages_S[indices_PG] = _group_advantages(kind, rewards_S[indices_PG])
    if kind == "batch_std":
        advantages_S = advantages_S / (_std(rewards_S) + STANDARD_DEVIATION_EPSILON)
    elif kind == "reinforce_pp_baseline":
        advantages_S = _whitened(advantages_S, num_tokens_S)
    return advantages_S.astype(np.float32)


def _by_size(groups: Sequence[Sequence[float]]) -> dict[int, np.ndarray]:
    """Indices of the completions (P, G) of all groups of one size, by that size."""
    sizes_P = np.fromiter(map(len, groups), np.int64, len(groups))
    starts_P = np.cumsum(sizes_P) - sizes_P
    return {int(size): starts_P[sizes_P == size][:, None] + np.arange(size) for size in np.unique(sizes_P)}


def _group_advantages(kind: Advantage, rewards_PG: np.ndarray) -> np.ndarray:
    """Advantages of groups of one size (P, G), before normalisation over the step."""
    is_finite_P = np.isfinite(rewards_PG).all(axis=1)
    if not is_finite_P.all():
        advantages_PG = np.full(rewards_PG.shape, np.nan)
        advantages_PG[is_finite_P] = _group_advantages(kind, rewards_PG[is_finite_P])
        return advantages_PG
    if kind == "reward":
        return rewards_PG
    centred_PG, size = _centred(rewards_PG, rewards_PG.mean(axis=1, keepdims=True)), rewards_PG.shape[1]
    if kind == "group_std":
        deviations_P1 = rewards_PG.std(axis=1, ddof=1, keepdims=True) if size > 1 else 0.0
        return centred_PG / (deviations_P1 + STANDARD_DEVIATION_EPSILON)
    if kind == "rloo":
        return centred_PG * size / max(size - 1, 1)
    if kind == "max_rl":
        return _divided_by_mean(rewards_PG, centred_PG)
    return centred_PG


def _divided_by_mean(rewards_PG: np.ndarray, centred_PG: np.ndarray) -> np.ndarray:
    if len(rewards_PG) and rewards_PG.min() < 0:
        raise TrainingStopped(
            f"learner.advantage=max_rl divides by the mean reward of a group and needs rewards of 0 or more, "
            f"got {rewards_PG.min():g}; choose learner.advantage=group_mean or change the reward"
        )
    means_P1 = rewards_PG.mean(axis=1, keepdims=True)
    return centred_PG / np.where(means_P1 > 0, means_P1, 1.0)


def _whitened(values_S: np.ndarray, num_tokens_S: Sequence[int]) -> np.ndarray:
    """Normalised to mean 0 and standard deviation 1 over all tokens of the step; a token has its completion's value."""
    share_S = np.asarray(num_tokens_S, np.float64) / max(sum(num_tokens_S), 1)
    centred_S = _centred(values_S, (share_S * values_S).sum())
    return centred_S / (np.sqrt((share_S * centred_S**2).sum()) + STANDARD_DEVIATION_EPSILON)


def _centred(values: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Values less their means, over the last axis; exactly 0 if they are equal, where rounding would leave a
    gradient."""
    return np.where((values != values[..., :1]).any(axis=-1, keepdims=True), values - means, 0.0)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
