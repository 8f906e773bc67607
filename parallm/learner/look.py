"""Keeps what an update computes of some completions, for people to look at. `Learner` calls it; it computes nothing.

Axes: N completion tokens of a micro-batch, T tokens of one completion.
"""

from collections.abc import Collection, Sequence

import numpy as np

from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.gradient import TokenStatistics
from parallm.metrics.rollout_format import LearnedCompletion
from parallm.types import CompletionIndex, TrajectoryGroup


class Look:
    """The completions to look at in one update."""

    def __init__(self, chosen: Collection[int], groups: Sequence[TrajectoryGroup]) -> None:
        """`chosen` counts the completions of all `groups`."""
        indices = [(number, index) for number, group in enumerate(groups) for index in range(len(group.trajectories))]
        wanted = frozenset(chosen)
        self._chosen = {index for number, index in enumerate(indices) if number in wanted}
        self._looked: list[LearnedCompletion] = []

    def add(self, batch: MicroBatch, statistics: TokenStatistics, indices: Sequence[CompletionIndex]) -> None:
        """Keep the rows of a micro-batch that are chosen. `indices`: those of each completion of the step."""
        if not self._chosen:
            return
        logprobs_N, entropies_N, clipped_N = (
            np.array(array) for array in (statistics.logprobs_N, statistics.entropies_N, statistics.clipped_N)
        )
        begin = 0
        for row, length in zip(batch.completions_S, np.bincount(batch.rows_N), strict=True):
            own = slice(begin, begin := begin + int(length))
            group, index = indices[int(row)]
            if (group, index) in self._chosen:
                self._looked.append(
                    LearnedCompletion(
                        group=group,
                        index=index,
                        advantages_T=batch.advantages_N[own],
                        logprobs_T=logprobs_N[own],
                        entropies_T=entropies_N[own],
                        clipped_T=clipped_N[own],
                    )
                )

    def take(self) -> list[LearnedCompletion]:
        """Hand over what was kept, and forget it."""
        looked, self._looked = self._looked, []
        return looked
