"""What an episode of `verifiers` is worth, as reward parts."""

from collections.abc import Mapping

TOTAL = "verifiers/reward"
"""The environment's own reward, by its own weights. The parts beside it are only logged."""
WEIGHTS: Mapping[str, float] = {TOTAL: 1.0}
CORRECT = "correct"


class EpisodeFailed(Exception):
    """The environment has ended an episode with an error instead of a reward."""


def add_correct(parts: Mapping[str, float], correct_at: float) -> Mapping[str, float]:
    """`parts` and whether the reward is enough, unless a part says so itself."""
    return {CORRECT: float(parts[TOTAL] >= correct_at), **parts}
