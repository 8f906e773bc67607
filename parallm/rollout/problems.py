"""Problems in a shuffled order that follows from the seed alone: epoch after epoch, each problem once per epoch."""

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSplits:
    train: Sequence[Problem]
    test: Sequence[Problem]
    """Held out; empty where nothing is evaluated."""


def load_problems(environment: AnyEnvironment, num_test: int) -> ProblemSplits:
    """All training problems and the first `num_test` held-out ones; with 0 the test split is not asked for.

    Raises ProblemError if there is nothing to train on, and what reading raises.
    """
    train = environment.problems("train")
    if not train:
        raise ProblemError("the environment's train split has no problems, so there is nothing to train on")
    return ProblemSplits(train=train, test=environment.problems("test")[:num_test] if num_test else ())


class ProblemCursor:
    """A stream of problems with its account. Draws are places in the stream: a place always means the same problem."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._cursor = stream.cursor  # the first place that was never drawn
        self._again: deque[int] = deque()  # places that were drawn in vain and come first
        self._unclaimed: list[int] = []
        self._drawn: dict[int, list[int]] = {}

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems. `claim` them for a step before anything else draws."""
        return [self._next() for _ in range(count)]

    @property
    def last_index(self) -> int:
        """Of what was drawn last and not claimed yet."""
        return self._unclaimed[-1]

    def claim(self, step: int) -> None:
        """Book what was drawn since the last claim on `step`."""
        self._drawn.setdefault(step, []).extend(self._unclaimed)
        self._unclaimed = []

    def commit(self, step: int) -> None:
        """Forget what `step` has drawn: it was trained on, or taught nothing."""
        self._drawn.pop(step, None)

    def requeue(self, steps: Iterable[int]) -> None:
        """Let what these steps have drawn be the next to draw, in the order of the steps."""
        places = [place for step in sorted(steps) for place in self._drawn.pop(step, [])]
        self._again.extendleft(reversed(places))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: steps that are not settled begin anew after `restore`."""
        open_steps = [place for step in sorted(self._drawn) for place in self._drawn[step]]
        return {"cursor": self._cursor, "again": [*open_steps, *self._unclaimed, *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` says; one without `again` has no open steps."""
        self._cursor = int(state["cursor"])
        self._again = deque(state.get("again", ()))
        self._unclaimed, self._drawn = [], {}

    def _next(self) -> Problem:
        if self._again:
            place = self._again.popleft()
        else:
            place = self._cursor
            self._cursor += 1
        self._unclaimed.append(place)
        self._stream.cursor = place
        return self._stream.take(1)[0]
