"""Sums over mx.distributed, and gathers over the channel, as an `Exchange`.

One thread with a stream of its own makes all collectives, one after the other: they have no tags, so all ranks must
make them in the same order. A sum begins after a gather of all ranks, so it never spins on a device while it waits for
a late one. A collective whose peer is gone may never return; the watchdog of the channel then fails the future.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

import mlx.core as mx

from parallm.device.load_mlx import first_use
from parallm.distributed.channel import Channel, settle
from parallm.distributed.exchange import Vectors, add_slots
from parallm.distributed.identity import Backend
from parallm.errors import ExchangeFailed

logger = logging.getLogger(__name__)


class Collective:
    """The exchange of several processes."""

    def __init__(self, channel: Channel, backend: Backend, *, exact: bool) -> None:
        """Join the group of `backend`. Raises ExchangeFailed if that fails or takes too long."""
        self._channel = channel
        self._exact = exact
        self._work: queue.SimpleQueue[tuple[Vectors, Sequence[int], int, int, Future[mx.array]] | None] = (
            queue.SimpleQueue()
        )
        self._seconds = {"exchange/wait_seconds": 0.0, "exchange/sum_seconds": 0.0}
        self._lock = threading.Lock()
        self._num_open, self._open_since = 0, 0.0  # gathers that wait, of several steps with steps ahead
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
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._open_since = time.perf_counter()
        future = self._channel.gather(label, part)
        future.add_done_callback(self._count_wait)
        return future

    def loss(self) -> Future[list[bytes]]:
        return self._channel.loss()

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        future: Future[mx.array] = Future()
        self._work.put((vectors_N, used, slots, length, future))
        return future

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
            vectors_N, used, slots, length, future = work
            began = time.perf_counter()
            try:
                with mx.stream(stream), self._channel.guarded("a sum", future):
                    total_N = self._sum(vectors_N, used, slots, length, group, stream)
                    mx.eval(total_N)
            except (RuntimeError, ExchangeFailed) as error:
                self._channel.fail(f"rank {self.rank} cannot sum: {error}")
                settle(future, error=ExchangeFailed(self.failure or str(error)))
                return
            self._add("exchange/sum_seconds", time.perf_counter() - began)
            settle(future, total_N)

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
            return mx.distributed.all_sum(own[0], group=group, stream=stream)
        rows = -(-slots // self.size)
        own += [zeros_N] * (rows - len(own))
        all_SN = mx.distributed.all_gather(mx.stack(own), group=group, stream=stream)
        return add_slots([all_SN[slot % self.size * rows + slot // self.size] for slot in used])

    def _count_wait(self, _: Future[list[bytes]]) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                self._add("exchange/wait_seconds", time.perf_counter() - self._open_since)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
