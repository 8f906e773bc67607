"""Training problems in a shuffled order: which step has drawn which, and which are passed over. Used by `Collector`.

The order follows from the seed alone: epoch after epoch, each problem once per epoch.
"""

import hashlib
import logging
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from parallm.environment.environment import AnyEnvironment, Mixed
from parallm.errors import ConfigError, ProblemError
from parallm.rollout.settings import CurriculumSettings
from parallm.seeds import mix
from parallm.types import Problem, TrajectoryGroup

BLOCK = 1000
"""Draws after which a mixture of environments repeats its plan."""

logger = logging.getLogger(__name__)


class ProblemStream:
    """An endless supply of one environment's training problems. An index always means the same problem."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._problems = problems
        self._seed = seed
        self._epoch = -1  # the epoch of `_order`
        self._order: list[int] = []

    @property
    def digest(self) -> str:
        """Digest of the problems and of their order except for the seed: in equal streams an index means the same."""
        return _sha256(map(repr, self._problems))

    def at(self, index: int) -> Problem:
        """Return the problem of the `index`-th draw."""
        epoch, offset = divmod(index, len(self._problems))
        if epoch != self._epoch:
            self._order = list(range(len(self._problems)))
            random.Random(mix(self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._problems[self._order[offset]]


class MixedStream:
    """Draws from several streams by name, in the order of a plan of names that repeats.

    An environment with few problems starts its next epoch while others are still in their first.
    """

    def __init__(self, streams: Mapping[str, ProblemStream], plan: Sequence[str]) -> None:
        self._streams = streams
        self._plan = plan

    @property
    def digest(self) -> str:
        return _sha256([*self._plan, *(stream.digest for stream in self._streams.values())])

    def at(self, index: int) -> Problem:
        num_blocks, offset = divmod(index, len(self._plan))
        name = self._plan[offset]
        return self._streams[name].at(num_blocks * self._plan.count(name) + self._plan[:offset].count(name))


Stream: TypeAlias = ProblemStream | MixedStream


def even_plan(shares: Mapping[str, float], length: int) -> list[str]:
    """Return names in proportion to their shares, where every slice of the plan has nearly the same proportions."""
    total = sum(shares.values())
    counts = dict.fromkeys(shares, 0)
    plan = []
    for number in range(1, length + 1):
        name = max(shares, key=lambda name: number * shares[name] / total - counts[name])
        counts[name] += 1
        plan.append(name)
    return plan


def make_stream(environment: AnyEnvironment, problems: Sequence[Problem], seed: int) -> Stream:
    """Return a stream of `problems`, the train split of `environment`; each part of a mixture keeps its own order.

    Raises ProblemError for an environment without problems, and ConfigError for one that would never be drawn.
    """
    if not isinstance(environment, Mixed):
        return ProblemStream(problems, seed)
    plan = even_plan(environment.shares, BLOCK)
    streams: dict[str, ProblemStream] = {}
    for index, name in enumerate(environment.shares):
        own_problems = [problem for problem in problems if problem.environment == name]
        if not own_problems:
            raise ProblemError(f"environment.parts.{name}: the train split has no problems")
        if name not in plan:
            raise ConfigError(f"environment.parts.{name}.weight is less than one draw in {BLOCK}; raise it")
        streams[name] = ProblemStream(own_problems, mix(seed, index))
    return MixedStream(streams, plan)


def _sha256(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSplits:
    """The problems of a run, read before its model is loaded."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    """Held-out problems; empty if nothing is evaluated."""


def load_problems(environment: AnyEnvironment, num_test: int) -> ProblemSplits:
    """Return all training problems and the first `num_test` held-out ones; with 0 the test split is not read.

    Raises ProblemError if there is nothing to train on, and what reading raises.
    """
    train = environment.problems("train")
    if not train:
        raise ProblemError("the environment's train split has no problems, so there is nothing to train on")
    return ProblemSplits(train=train, test=environment.problems("test")[:num_test] if num_test else ())


class ProblemCursor:
    """The position of a run in its stream, as an account of which step has drawn which problems.

    An interrupted step draws the same problems again. Steps that are collected at the same time draw in turns, so one
    number does not tell what a finished step has used.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._cursor = 0  # the first index that was never drawn
        self._again: deque[int] = deque()  # indices that were drawn in vain and come first
        self._unclaimed: list[int] = []
        self._drawn: dict[int, list[int]] = {}

    def take(self, count: int) -> list[Problem]:
        """Draw the next `count` problems. `claim` them for a step before the next draw."""
        return [self._next() for _ in range(count)]

    @property
    def last_index(self) -> int:
        """Index of the newest problem that is not claimed yet."""
        return self._unclaimed[-1]

    def claim(self, step: int) -> None:
        """Book everything that was drawn since the last claim on `step`."""
        self._drawn.setdefault(step, []).extend(self._unclaimed)
        self._unclaimed = []

    def commit(self, step: int) -> None:
        """Drop the draws of `step`: it was trained on, or taught nothing."""
        self._drawn.pop(step, None)

    def requeue(self, steps: Iterable[int]) -> None:
        """Make the draws of these steps the next ones. The next draws are in the order of the stream."""
        indices = [index for step in steps for index in self._drawn.pop(step, [])]
        self._again = deque(sorted([*indices, *self._again]))

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON: steps that are not committed begin anew after `restore`."""
        open_draws = [index for indices in self._drawn.values() for index in indices]
        return {"cursor": self._cursor, "again": sorted([*open_draws, *self._unclaimed, *self._again])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; one without `again` has no open steps."""
        self._cursor = int(state["cursor"])
        self._again = deque(state.get("again", ()))
        self._unclaimed, self._drawn = [], {}

    def _next(self) -> Problem:
        if self._again:
            index = self._again.popleft()
        else:
            index = self._cursor
            self._cursor += 1
        self._unclaimed.append(index)
        return self._stream.at(index)


class Curriculum:
    """Fewer draws of problems that the policy nearly always or nearly never solves.

    Their groups have mostly equal rewards, which teach nothing. A draw follows from the seed, the cursor's index and
    the solve rates. `state` is all there is to save.
    """

    def __init__(self, problem_cursor: ProblemCursor, settings: CurriculumSettings, seed: int) -> None:
        self._problem_cursor = problem_cursor
        self._settings = settings
        self._seed = seed
        self._rates: dict[str, deque[float]] = {}
        self.num_skipped = 0  # problems passed over since the start of this process

    def take(self, count: int) -> list[Problem]:
        """Draw the next `count` problems from the cursor, together with those that are passed over."""
        if self._settings.by == "off":
            return self._problem_cursor.take(count)
        return [self._next() for _ in range(count)]

    def learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the solve rates of a finished step. An interrupted step must leave none, since it runs again."""
        for group in groups:
            if self._settings.by != "off" and group.solve_rate is not None:
                window = self._settings.window
                self._rates.setdefault(self._key(group.problem), deque(maxlen=window)).append(group.solve_rate)

    def rate(self, problem: Problem) -> float | None:
        """The solve rate that decides about `problem`; None before its first group."""
        rates = self._rates.get(self._key(problem))
        return fmean(rates) if rates else None

    def state(self) -> dict[str, Any]:
        rates = {key: list(rates) for key, rates in self._rates.items()}
        return {"curriculum": {"by": self._settings.by, "rates": rates}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Rates of a curriculum by something else are dropped."""
        saved = state.get("curriculum", {"by": self._settings.by, "rates": {}})
        if saved["by"] != self._settings.by:
            logger.warning("rollout.curriculum.by was %s and is %s: it starts anew", saved["by"], self._settings.by)
            return
        window = self._settings.window
        self._rates = {key: deque(rates, maxlen=window) for key, rates in saved["rates"].items()}

    def _next(self) -> Problem:
        while True:  # ends, since each round keeps its problem with a probability of at least `keep`
            (problem,) = self._problem_cursor.take(1)
            dice = mix(self._seed, self._problem_cursor.last_index) / 2**64
            rate = self.rate(problem)
            if rate is None or self._settings.low <= rate <= self._settings.high or dice < self._settings.keep:
                return problem
            self.num_skipped += 1

    def _key(self, problem: Problem) -> str:
        if self._settings.by == "problem":
            return problem.problem_id
        return f"{problem.environment}/{problem.level}"
