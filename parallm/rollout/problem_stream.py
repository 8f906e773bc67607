"""Problems in a shuffled order that follows from the seed alone: epoch after epoch, each problem once per epoch."""

import random
from collections.abc import Sequence

from parallm.seeds import mix
from parallm.types import Problem


class ProblemStream:
    """Endless supply of training problems. `cursor` is all there is to save."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._problems = problems
        self._seed = seed
        self.cursor = 0  # problems given so far; written by `take` and by whoever resumes a run
        self._epoch = -1  # of `_order`
        self._order: list[int] = []

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Problem:
        epoch, place = divmod(self.cursor, len(self._problems))
        if epoch != self._epoch:
            self._order = list(range(len(self._problems)))
            random.Random(mix(self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        self.cursor += 1
        return self._problems[self._order[place]]
