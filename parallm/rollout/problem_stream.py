"""Problems in a shuffled order that follows from the seed alone: epoch after epoch, each problem once per epoch."""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from parallm.environment.environment import AnyEnvironment, Mixed
from parallm.errors import ConfigError, ProblemError
from parallm.seeds import mix
from parallm.types import Problem

BLOCK = 1000
"""Draws after which a mixture of environments repeats its plan."""


class Stream(Protocol):
    """Endless supply of training problems. `cursor` is all there is to save."""

    cursor: int
    """Problems given so far; written by `take` and by whoever resumes a run."""

    @property
    def digest(self) -> str:
        """Digest of the problems and of their order but for the seed: a cursor means the same in equal streams."""

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""


class ProblemStream:
    """The problems of one environment."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._problems = problems
        self._seed = seed
        self.cursor = 0
        self._epoch = -1  # of `_order`
        self._order: list[int] = []

    @property
    def digest(self) -> str:
        return _sha256(map(repr, self._problems))

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


class MixedStream:
    """Draws from several streams by name, following a plan of names over and over.

    An environment with few problems starts its next epoch while others are still in their first.
    """

    def __init__(self, streams: Mapping[str, Stream], plan: Sequence[str]) -> None:
        self._streams = streams
        self._plan = plan

    @property
    def cursor(self) -> int:
        return sum(stream.cursor for stream in self._streams.values())

    @cursor.setter
    def cursor(self, value: int) -> None:
        blocks, place = divmod(value, len(self._plan))
        for name, stream in self._streams.items():
            stream.cursor = blocks * self._plan.count(name) + self._plan[:place].count(name)

    @property
    def digest(self) -> str:
        return _sha256([*self._plan, *(stream.digest for stream in self._streams.values())])

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        begin = self.cursor
        names = [self._plan[place % len(self._plan)] for place in range(begin, begin + count)]
        return [problem for name in names for problem in self._streams[name].take(1)]


def even_plan(shares: Mapping[str, float], length: int) -> list[str]:
    """Names in proportion to their shares, so that any stretch of the plan has nearly the same proportions."""
    total = sum(shares.values())
    given = dict.fromkeys(shares, 0)
    plan = []
    for place in range(1, length + 1):
        name = max(shares, key=lambda name: place * shares[name] / total - given[name])
        given[name] += 1
        plan.append(name)
    return plan


def make_stream(environment: AnyEnvironment, problems: Sequence[Problem], seed: int) -> Stream:
    """A stream of `problems`, the train split of `environment`; of several environments, each in its own order.

    Raises ProblemError for an environment without problems, and ConfigError for one that would never be drawn.
    """
    if not isinstance(environment, Mixed):
        return ProblemStream(problems, seed)
    plan = even_plan(environment.shares, BLOCK)
    streams: dict[str, Stream] = {}
    for place, name in enumerate(environment.shares):
        own = [one for one in problems if one.environment == name]
        if not own:
            raise ProblemError(f"environment.parts.{name}: the train split has no problems")
        if name not in plan:
            raise ConfigError(f"environment.parts.{name}.weight is less than one draw in {BLOCK}; raise it")
        streams[name] = ProblemStream(own, mix(seed, place))
    return MixedStream(streams, plan)


def _sha256(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()
