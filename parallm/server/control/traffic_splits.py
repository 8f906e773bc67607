"""Weighted splits: several versions answer the requests for one name, each by its share.

`generation.py` routes each request; the routes of `routes_splits.py` change the splits. On the asyncio thread only.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from parallm.errors import InvalidRequest, UnknownModel
from parallm.server.catalog import card_of
from parallm.types import BASE, AdapterCard, GenerationRequest

MAX_TARGETS = 16
MAX_SPLITS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSplit:
    """The models in `shares`, which add up to 1, answer requests for `name`."""

    name: str
    shares: Mapping[str, float]


async def _store_nothing(_: Mapping[str, Mapping[str, float]]) -> None: ...


class TrafficSplits:
    """Splits by name, beginning with `given`.

    `store` gets the shares of all splits before a change counts. If it raises, nothing has changed.
    """

    def __init__(
        self,
        catalog: Callable[[], tuple[AdapterCard, ...]],
        policies: Sequence[str],
        store: Callable[[Mapping[str, Mapping[str, float]]], Awaitable[None]] = _store_nothing,
        given: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self._catalog = catalog
        self._policies = policies
        self._store = store
        self._splits = {name: TrafficSplit(name=name, shares=shares) for name, shares in (given or {}).items()}
        self._lock = asyncio.Lock()  # one change at a time
        self._positions = positions()
        self._available: dict[str, frozenset[str]] = {}  # models of each split at its last request

    def all(self) -> tuple[TrafficSplit, ...]:
        return tuple(self._splits.values())

    async def put(self, name: str, weights: Mapping[str, float]) -> TrafficSplit:
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
        split = TrafficSplit(name=name, shares={model: weight / total for model, weight in weights.items()})
        async with self._lock:
            await self._change({**self._splits, name: split})
        return split

    async def remove(self, name: str) -> None:
        """Let `name` mean what it meant. Raises UnknownModel."""
        async with self._lock:
            if name not in self._splits:
                raise UnknownModel(f"no split {name!r}; there are {sorted(self._splits)}")
            await self._change({other: split for other, split in self._splits.items() if other != name})

    def routed(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Route the requests of one answer, all to one side of the split of their name, if it has one.

        A user stays on a side as long as the shares do. Requests without a user take positions in turn: a hash of
        their ids would put one share in twenty of 2,000 requests off by more than two points.
        """
        split = self._splits.get(requests[0].model)
        if split is None:
            return list(requests)
        user = requests[0].user
        model = self._chosen(split, next(self._positions) if user is None else user_position(split.name, user))
        return [replace(request, model=model, split=split.name) for request in requests]

    async def _change(self, splits: dict[str, TrafficSplit]) -> None:
        await self._store({name: split.shares for name, split in splits.items()})
        self._available.clear()
        self._splits = splits

    def _chosen(self, split: TrafficSplit, position: float) -> str:
        """Return the model at a position from 0 to 1 among those still available; `split.name` itself if none is."""
        cards = self._catalog()
        shares = {model: share for model, share in split.shares.items() if self._is_available(model, cards)}
        if shares.keys() != self._available.get(split.name, split.shares.keys()):
            logger.warning("of the split of %s are left %s", split.name, ", ".join(shares) or "none")
        self._available[split.name] = frozenset(shares)
        remaining = position * sum(shares.values())
        for model, share in shares.items():
            remaining -= share
            if remaining < 0:
                return model
        return next(reversed(shares), split.name)

    def _is_available(self, model: str, cards: Sequence[AdapterCard]) -> bool:
        return model == BASE or model in self._policies or card_of(model, cards) is not None


def user_position(name: str, user: str) -> float:
    """Return a position from 0 up to 1: even over users, and independent between splits."""
    return int.from_bytes(blake2b(f"{name}\0{user}".encode(), digest_size=8).digest()) / 2**64


def positions() -> Iterator[float]:
    """Yield positions from 0 up to 1 that fill it evenly at any time: multiples of the golden ratio, modulo 1."""
    return (number * (5**0.5 - 1) / 2 % 1 for number in itertools.count())
