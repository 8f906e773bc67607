"""Exchange between workers: bytes of all ranks, and the sum of their gradients. One process is the case of one rank.

Gradients come as partial sums by slot. A plain sum has a slot for each rank; with `exact` there is a fixed number of
slots whatever the number of ranks is, and they are added in their order.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import mlx.core as mx

Vectors = Mapping[int, mx.array]


class Gathering(Protocol):
    """Messages over the channel. Methods may be called from any thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def failure(self) -> str | None:
        """Why the exchange has ended; None while it works."""

    def fail(self, reason: str) -> None:
        """End the exchange for all ranks."""

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        """Return the parts of all ranks, in the order of ranks; they should be small. Raises ExchangeFailed."""

    def post(self, content: bytes) -> None:
        """Send bytes from another rank to rank 0. Waits for nothing."""

    def take_post(self, seconds: float) -> tuple[int, bytes | None] | None:
        """Return a rank and what it has posted, at rank 0, in the order of arrival; None in its place after the last.

        Returns None if nothing comes in this time.
        """

    def finish(self) -> None:
        """Need no other rank from now on: that one ends is no failure. Posts still come and go."""

    def loss(self) -> Future[list[bytes]]:
        """Return a future that gets ExchangeFailed when the exchange ends, and no result. Cancel it after use."""

    def close(self, reason: str = "") -> None:
        """Leave, with a reason if the run has not come to its end."""


class Exchange(Gathering, Protocol):
    """Sums take evaluated arrays, and are called by all ranks in the same order."""

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        """Return the parts of all ranks, in the order of ranks, whatever their sizes. Raises ExchangeFailed."""

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        """Return the sum (N,) of the slots `used`, in their order. Raises ExchangeFailed.

        `vectors_N` holds the used slots of this rank: of `slots` slots, rank r has those whose remainder by the number
        of ranks is r. `length` is N.
        """

    def take_seconds(self) -> dict[str, float]:
        """Seconds of gathers and sums since the last call, by names for metrics."""


class Alone:
    """The exchange of a process that trains alone."""

    rank, size, failure = 0, 1, None

    def fail(self, reason: str) -> None:
        raise AssertionError(f"one process has no peer to lose: {reason}")

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        return done([part])

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        return done([part])

    def post(self, content: bytes) -> None:
        raise AssertionError("one process is rank 0")

    def take_post(self, seconds: float) -> tuple[int, bytes | None] | None:
        return None

    def finish(self) -> None: ...

    def loss(self) -> Future[list[bytes]]:
        return Future()

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        total_N = add_slots([vectors_N[slot] for slot in used])
        mx.eval(total_N)
        return done(total_N)

    def take_seconds(self) -> dict[str, float]:
        return {}

    def close(self, reason: str = "") -> None: ...


def add_slots(vectors_N: Sequence[mx.array]) -> mx.array:
    """The sum in the given order."""
    total_N = vectors_N[0]
    for vector_N in vectors_N[1:]:
        total_N = total_N + vector_N
    return total_N


def done(result: Any) -> Future[Any]:
    """A future that has this result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future
