"""Weighted splits of a name between versions, and counts of what each version has answered.

`generation.py` routes each request, and the engine gateway counts it at its end. `routes_splits.py` changes splits;
it and `/metrics` show the counts. On the asyncio thread only.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias, TypeVar

from parallm.errors import InvalidRequest, UnknownModel
from parallm.reports import VersionReport
from parallm.server.catalog import answered_by, card_of
from parallm.server.engine_gateway import answer_id
from parallm.types import BASE, AdapterCard, Completion, GenerationRequest

MAX_TARGETS = 16
MAX_SPLITS = 64
MAX_NAMES = 256
MAX_VERSIONS = 64
"""Versions of each name; the newest ones are kept."""
MAX_ANSWERS = 16_384
"""Answers that a reward may still come for."""

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


Shares: TypeAlias = Mapping[str, float]
"""Shares of the requests for a name by the model that answers, which add up to 1."""


async def _store_nothing(_: Mapping[str, Shares]) -> None: ...


class TrafficSplits:
    """Splits by name, beginning with `given`.

    `store` gets the shares of all splits before a change counts. If it raises, nothing has changed.
    """

    def __init__(
        self,
        catalog: Callable[[], tuple[AdapterCard, ...]],
        policies: Sequence[str],
        store: Callable[[Mapping[str, Shares]], Awaitable[None]] = _store_nothing,
        given: Mapping[str, Shares] | None = None,
    ) -> None:
        self._catalog = catalog
        self._policies = policies
        self._store = store
        self._splits = dict(given or {})
        self._lock = asyncio.Lock()  # one change at a time
        self._positions = positions()
        self._available: dict[str, frozenset[str]] = {}  # models of each split at its last request

    def all(self) -> Mapping[str, Shares]:
        return self._splits

    async def put(self, name: str, weights: Mapping[str, float]) -> None:
        """Split `name` from now on. Raises InvalidRequest, and UnknownModel for a target that is not there."""
        total = sum(weights.values())
        if not weights or len(weights) > MAX_TARGETS or min(weights.values()) < 0 or not 0 < total < float("inf"):
            raise InvalidRequest(f"weights should name 1 to {MAX_TARGETS} models, none below 0, not all 0", "weights")
        if "@" in name or name == BASE or (name not in self._splits and len(self._splits) >= MAX_SPLITS):
            raise InvalidRequest(
                f"{name!r} cannot be split: it is one version, or there are {MAX_SPLITS} splits", "name"
            )
        for model in weights:
            if not self._is_available(model, self._catalog()):
                raise UnknownModel(f"no model {model!r}; a split is among models that are there")
        shares = {model: weight / total for model, weight in weights.items()}
        async with self._lock:
            await self._change({**self._splits, name: shares})

    async def remove(self, name: str) -> None:
        """Let `name` mean what it meant. Raises UnknownModel."""
        async with self._lock:
            if name not in self._splits:
                raise UnknownModel(f"no split {name!r}; there are {sorted(self._splits)}")
            await self._change({other: shares for other, shares in self._splits.items() if other != name})

    def routed(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Route the requests of one answer, all to one side of the split of their name, if it has one.

        A user stays on a side as long as the shares do. Requests without a user take positions in turn: a hash of
        their ids would put one share in twenty of 2,000 requests off by more than two points.
        """
        name, user = requests[0].model, requests[0].user
        if name not in self._splits:
            return list(requests)
        model = self._chosen(name, next(self._positions) if user is None else user_position(name, user))
        return [replace(request, model=model, split=name) for request in requests]

    async def _change(self, splits: dict[str, Shares]) -> None:
        await self._store(splits)
        self._available.clear()
        self._splits = splits

    def _chosen(self, name: str, position: float) -> str:
        """Return the model at a position from 0 to 1 among those still available; `name` itself if none is."""
        cards, whole = self._catalog(), self._splits[name]
        shares = {model: share for model, share in whole.items() if self._is_available(model, cards)}
        if shares.keys() != self._available.get(name, whole.keys()):
            logger.warning("of the split of %s are left %s", name, ", ".join(shares) or "none")
        self._available[name] = frozenset(shares)
        remaining = position * sum(shares.values())
        for model, share in shares.items():
            remaining -= share
            if remaining < 0:
                return model
        return next(reversed(shares), name)

    def _is_available(self, model: str, cards: Sequence[AdapterCard]) -> bool:
        return model == BASE or model in self._policies or card_of(model, cards) is not None


def user_position(name: str, user: str) -> float:
    """Return a position from 0 up to 1: even over users, and independent between splits."""
    return int.from_bytes(blake2b(f"{name}\0{user}".encode(), digest_size=8).digest()) / 2**64


def positions() -> Iterator[float]:
    """Yield positions from 0 up to 1 that fill it evenly at any time: multiples of the golden ratio, modulo 1."""
    return (number * (5**0.5 - 1) / 2 % 1 for number in itertools.count())


@dataclass(slots=True)
class VersionCounts:
    num_requests: int = 0
    num_completions: int = 0
    num_tokens: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0

    def report(self) -> VersionReport:
        return VersionReport(
            num_requests=self.num_requests,
            num_completions=self.num_completions,
            num_tokens=self.num_tokens,
            num_rewards=self.num_rewards,
            reward_mean=self.reward_sum / self.num_rewards if self.num_rewards else None,
        )


@dataclass(slots=True)
class _Trajectory:
    """The version that gave a trajectory, and its last reward."""

    counts: VersionCounts
    reward: float | None = None


class VersionStatistics:
    """Counts since the start of the process, bounded in names and versions."""

    def __init__(self, catalog: Callable[[], tuple[AdapterCard, ...]]) -> None:
        self._catalog = catalog
        self._names: OrderedDict[str, OrderedDict[str, VersionCounts]] = OrderedDict()
        self._answers: OrderedDict[str, VersionCounts] = OrderedDict()
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()

    def count(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """Count one request that has ended."""
        counts = self._counts(request, completions[0])
        counts.num_requests += 1
        counts.num_completions += len(completions)
        counts.num_tokens += sum(len(completion.tokens) for completion in completions)
        _keep(self._answers, answer_id(request.request_id), counts, MAX_ANSWERS)

    def reward(self, answer: str, reward: float) -> None:
        """Add a reward to the version that gave this answer. Raises InvalidRequest for an unknown id.

        `answer` is the id of the answer or the `request_id` of its request.
        """
        names = (answer, f"cmpl-{answer}", f"chatcmpl-{answer}")
        counts = next((self._answers[name] for name in names if name in self._answers), None)
        if counts is None:
            raise InvalidRequest(
                f"no answer {answer[:100]!r} among the last {MAX_ANSWERS}; send the `id` of an answer that has ended",
                "id",
            )
        counts.num_rewards += 1
        counts.reward_sum += reward

    def note_trajectory(self, trajectory_id: str, request: GenerationRequest, completion: Completion) -> None:
        """Remember which version gave a trajectory, for its reward."""
        _keep(self._trajectories, trajectory_id, _Trajectory(self._counts(request, completion)), MAX_ANSWERS)

    def reward_trajectory(self, trajectory_id: str, reward: float) -> None:
        """Count the reward of a trajectory, of which the last one counts; those of an earlier process are ignored."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            return
        if trajectory.reward is None:
            trajectory.counts.num_rewards += 1
        trajectory.counts.reward_sum += reward - (trajectory.reward or 0.0)
        trajectory.reward = reward

    def of(self, name: str) -> dict[str, VersionCounts]:
        """Return the counts by version."""
        return dict(self._names.get(name, {}))

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def _counts(self, request: GenerationRequest, completion: Completion) -> VersionCounts:
        name = request.split or request.model
        version = answered_by(request.model, completion, self._catalog())
        versions = _keep(self._names, name, self._names.get(name, OrderedDict()), MAX_NAMES)
        return _keep(versions, version, versions.get(version, VersionCounts()), MAX_VERSIONS)


def _keep(kept: OrderedDict[str, Value], key: str, value: Value, limit: int) -> Value:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limit:
        kept.popitem(last=False)
    return value
