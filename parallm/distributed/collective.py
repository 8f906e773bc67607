"""Sums over mx.distributed, and large gathers between GPUs; other gathers over the channel. Together an `Exchange`.

One thread with a stream of its own makes all collectives, one after the other: they have no tags, so all ranks must
make them in the same order. Each is queued when a gather over the channel has ended, which all ranks see in one order;
so none spins on a device while it waits for a late rank. A collective whose peer is gone may never return; the watchdog
of the channel then fails the future.
"""

import itertools
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.device.load_mlx import first_use
from parallm.distributed.channel import Channel, settle
from parallm.distributed.exchange import Vectors, add_slots
from parallm.distributed.identity import Backend
from parallm.errors import ExchangeFailed

CLOSE_SECONDS = 5.0
"""Time to end the collectives that are queued when a worker leaves."""
GATHER, SUM = "exchange/gather_seconds", "exchange/sum_seconds"
Compute = Callable[[mx.distributed.Group, mx.Stream], Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """A collective for the thread."""

    label: str
    kind: str
    """The figure that its seconds are added to."""
    compute: Compute
    future: Future[Any]


class Collective:
    """The exchange of several processes."""

    def __init__(self, channel: Channel, backend: Backend, *, exact: bool) -> None:
        """Join the group of `backend`. Raises ExchangeFailed if that fails or takes too long."""
        self._channel = channel
        self._exact = exact
        # between GPUs; a ring of CPUs takes longer than the channel, which goes through rank 0
        self._gathers = backend == "nccl"
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._num_sums = itertools.count()
        self._seconds = {"exchange/wait_seconds": 0.0, GATHER: 0.0, SUM: 0.0}
        self._lock = threading.Lock()
        self._num_open, self._open_since = 0, 0.0  # gathers that wait, of several steps with steps ahead
        self._awaited: set[Future[Any]] = set()  # results of collectives
        channel.loss().add_done_callback(self._end_all)
        joined: Future[object] = Future()
        self._thread = threading.Thread(target=self._run, args=(backend, joined), name="exchange", daemon=True)
        with channel.guarded("joining the group", joined):
            self._thread.start()
            joined.result()

    @property
    def rank(self) -> int:
        return self._channel.rank

    @property
    def size(self) -> int:
        return self._channel.size

    @property
    def failure(self) -> str | None:
        return self._channel.failure

    def fail(self, reason: str) -> None:
        self._channel.fail(reason)

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        return self._gather(label, part, None)

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        if not self._gathers:
            return self.gather(label, part)

        def begin(lengths: list[bytes]) -> Compute:
            return partial(_all_gather, part, list(map(int, lengths)))

        return self._queue(label, GATHER, str(len(part)).encode(), begin)

    def post(self, content: bytes) -> None:
        self._channel.post(content)

    def take_post(self, seconds: float) -> tuple[int, bytes | None] | None:
        return self._channel.take_post(seconds)

    def finish(self) -> None:
        self._channel.finish()

    def loss(self) -> Future[list[bytes]]:
        return self._channel.loss()

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        compute = partial(self._sum, vectors_N, used, slots, length)
        return self._queue(f"sum {next(self._num_sums)}", SUM, b"", lambda _: compute)

    def take_seconds(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        for name in seconds:
            self._seconds[name] = 0.0
        late, self._channel.late_seconds = self._channel.late_seconds, defaultdict(float)
        if late:
            slowest = max(late, key=late.__getitem__)
            seconds |= {"exchange/slowest_rank": slowest, "exchange/slowest_seconds": late[slowest]}
        return seconds

    def close(self, reason: str = "") -> None:
        self._work.put(None)
        if self.failure is None:
            self._thread.join(CLOSE_SECONDS)  # others may count on this rank in what it has given up
        self._channel.close(reason)

    def _run(self, backend: Backend, joined: Future[object]) -> None:
        if (use := first_use()) is not None:
            use.join()
        try:
            # A ring gives up on a rank that comes 31 s later, which a busy machine needs to import MLX; and the call
            # below holds the interpreter's lock while it waits, so nothing that others wait for may still be queued.
            self._channel.meet("the start of joining")
            group = mx.distributed.init(strict=True, backend=backend)
            assert (group.rank(), group.size()) == (self.rank, self.size), "another group than that of the channel"
        except (RuntimeError, ValueError, AssertionError, ExchangeFailed) as error:
            self._channel.fail(f"rank {self.rank} cannot join the group of {backend}: {error}")
            return
        # a stream of its own: ring and jaccl would otherwise queue in front of all that computes on a CPU
        stream = mx.new_stream(mx.gpu if backend == "nccl" else mx.cpu)
        settle(joined)
        while (work := self._work.get()) is not None:
            began = time.perf_counter()
            try:
                with mx.stream(stream), self._channel.guarded(f"making {work.label}", work.future):
                    result = work.compute(group, stream)
            except Exception as error:  # noqa: BLE001  # whatever it is, others wait for this rank
                self._channel.fail(f"rank {self.rank} has failed in {work.label}: {error}")
                settle(work.future, error=ExchangeFailed(self.failure or str(error)))
                return
            self._add(work.kind, time.perf_counter() - began)
            settle(work.future, result)

    def _sum(
        self,
        vectors_N: Vectors,
        used: Sequence[int],
        slots: int,
        length: int,
        group: mx.distributed.Group,
        stream: mx.Stream,
    ) -> mx.array:
        zeros_N = mx.zeros((length,), mx.float32)
        own = [vectors_N.get(slot, zeros_N) for slot in range(self.rank, slots, self.size)]
        if not self._exact:
            total_N: mx.array = mx.distributed.all_sum(own[0], group=group, stream=stream)
            mx.eval(total_N)
            return total_N
        rows = -(-slots // self.size)
        own += [zeros_N] * (rows - len(own))
        all_SN = mx.distributed.all_gather(mx.stack(own), group=group, stream=stream)
        total_N = add_slots([all_SN[slot % self.size * rows + slot // self.size] for slot in used])
        mx.eval(total_N)
        return total_N

    def _gather(self, label: str, part: bytes, then: Callable[[list[bytes]], object] | None) -> Future[list[bytes]]:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._open_since = time.perf_counter()
        future = self._channel.gather(label, part, then)
        future.add_done_callback(self._count_wait)
        return future

    def _queue(self, label: str, kind: str, part: bytes, begin: Callable[[list[bytes]], Compute]) -> Future[Any]:
        """Make the collective that `begin` returns once all ranks have given their part."""
        future: Future[Any] = Future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        announced = self._gather(label, part, lambda parts: self._work.put(_Work(label, kind, begin(parts), future)))
        # a cancelled result has no time limit, but the collective is made: other ranks wait for this one in it
        future.add_done_callback(lambda ended: announced.cancel() if ended.cancelled() else None)
        if self.failure is not None:
            settle(future, error=ExchangeFailed(self.failure))
        return future

    def _end_all(self, lost: Future[list[bytes]]) -> None:
        for future in tuple(self._awaited):
            settle(future, error=lost.exception())

    def _count_wait(self, _: Future[list[bytes]]) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                self._add("exchange/wait_seconds", time.perf_counter() - self._open_since)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds


def _all_gather(part: bytes, lengths: Sequence[int], group: mx.distributed.Group, stream: mx.Stream) -> list[bytes]:
    """The parts of all ranks, in their order. `lengths`: bytes of each."""
    words = np.zeros(-(-max(lengths) // 4), np.uint32)
    words.view(np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
    if not len(words):
        return [b""] * len(lengths)
    all_RW = mx.distributed.all_gather(mx.array(words)[None], group=group, stream=stream)
    mx.eval(all_RW)  # which leaves Python to others while it waits
    return [row.tobytes()[:length] for row, length in zip(np.array(all_RW), lengths, strict=True)]
