"""Weighted splits: requests for one name are answered by several versions, each by its share. On the asyncio thread."""

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
    """`name` is answered by the models in `shares`, which add up to 1."""

    name: str
    shares: Mapping[str, float]


async def _forget(_: Mapping[str, Mapping[str, float]]) -> None:
    """Where nothing outlives the process."""


class TrafficSplits:
    """By name; `given` are those to begin with. `keep` gets the shares of all of them before a change counts.

    Where it raises, nothing has changed.
    """

    def __init__(
        self,
        catalog: Callable[[], tuple[AdapterCard, ...]],
        policies: Sequence[str],
        keep: Callable[[Mapping[str, Mapping[str, float]]], Awaitable[None]] = _forget,
        given: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self._catalog = catalog
        self._policies = policies
        self._keep = keep
        self._splits = {name: TrafficSplit(name=name, shares=shares) for name, shares in (given or {}).items()}
        self._lock = asyncio.Lock()  # one change at a time
        self._turns = turns()
        self._left: dict[str, frozenset[str]] = {}  # models of each split that were there at its last request

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
            if not self._is_there(model, self._catalog()):
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
        """The requests of one answer, all to one side of the split of their name, if it has one.

        A user stays on a side as long as the shares do. Answers for nobody in particular take places in turn: where a
        hash of their ids decided, one share in twenty of 2,000 requests would be off by more than two points.
        """
        split = self._splits.get(requests[0].model)
        if split is None:
            return list(requests)
        user = requests[0].user
        model = self._chosen(split, next(self._turns) if user is None else place_of(split.name, user))
        return [replace(request, model=model, split=split.name) for request in requests]

    async def _change(self, splits: dict[str, TrafficSplit]) -> None:
        await self._keep({name: split.shares for name, split in splits.items()})
        self._left.clear()
        self._splits = splits

    def _chosen(self, split: TrafficSplit, place: float) -> str:
        """The model at this place from 0 to 1, among those that are still there; `split.name` itself if none is."""
        cards = self._catalog()
        shares = {model: share for model, share in split.shares.items() if self._is_there(model, cards)}
        if shares.keys() != self._left.get(split.name, split.shares.keys()):
            logger.warning("of the split of %s are left %s", split.name, ", ".join(shares) or "none")
        self._left[split.name] = frozenset(shares)
        rest = place * sum(shares.values())
        for model, share in shares.items():
            rest -= share
            if rest < 0:
                return model
        return next(reversed(shares), split.name)

    def _is_there(self, model: str, cards: Sequence[AdapterCard]) -> bool:
        return model == BASE or model in self._policies or card_of(model, cards) is not None


def place_of(name: str, user: str) -> float:
    """From 0 up to 1, even over users, and of its own for each split."""
    return int.from_bytes(blake2b(f"{name}\0{user}".encode(), digest_size=8).digest()) / 2**64


def turns() -> Iterator[float]:
    """Places from 0 up to 1 that fill it evenly at any time: multiples of the golden ratio, modulo 1."""
    return (number * (5**0.5 - 1) / 2 % 1 for number in itertools.count())
