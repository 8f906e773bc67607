"""The workers behind a front: which of them answer now, how much each has to do, and connections to them.

A worker is out when its process is gone (a connection is refused or ends), when two of its `/ready` in a row have not
said so, or when it answers a request with 503; the next good `/ready` takes it in again. Nothing else takes it out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from parallm.distributed.front.connection import Address, Connection, Headers, Lost, NotReached, address_of, connect

READY_SECONDS = 7.0
"""Time for the answer of `/ready`, which gives up after 5 s itself."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LOOKS_AWAY = 0.1
MAX_FAILURES = 2
MAX_IDLE_SECONDS = 60.0
"""A worker closes an idle connection after 75 s."""

logger = logging.getLogger(__name__)


class NoWorker(Exception):
    """No worker was ready in time."""


class Worker:
    """One worker. `load` counts the rows that it computes for this front."""

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.address = address
        self.load = 0
        self.num_requests = 0
        """Requests that were handed to it so far."""
        self.is_up = False
        self.look = asyncio.Event()
        """An event that is set when the state may have changed."""
        self._idle: list[tuple[float, Connection]] = []
        self._used: set[Connection] = set()

    async def take(self) -> Connection:
        """Return a connection for one request, which `give_back` has to get. Raises NotReached."""
        connection = self._unused() or await connect(self.address)
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer is whole for the next request, close any other one."""
        self._used.discard(connection)
        if connection.finish():
            self._idle.append((time.monotonic(), connection))

    async def ask(
        self, method: str, target: bytes, headers: Headers = (), body: bytes = b""
    ) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of a whole answer. Raises Lost."""
        connection = await self.take()
        try:
            connection.send(method, target, [(b"host", self.address.authority), *headers], body)
            status, own = await connection.head()
            return status, own, await connection.whole()
        finally:
            self.give_back(connection)

    def drop_connections(self) -> None:
        """End all requests at a worker that does not answer any more."""
        for connection in (*self._used, *(idle for _, idle in self._idle)):
            connection.close()
        self._idle = []

    def _unused(self) -> Connection | None:
        oldest = time.monotonic() - MAX_IDLE_SECONDS
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_idle and since > oldest:
                return connection
            connection.close()
        return None


class Workers:
    """All workers, by rank. Used on the event loop only."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.num_waiting = 0
        """Requests that wait for a worker."""
        self._is_ending = False

    @property
    def all(self) -> Sequence[Worker]:
        """Every worker, the leader (rank 0, or the lowest there is) first."""
        return [self._workers[rank] for rank in sorted(self._workers)]

    @property
    def up(self) -> Sequence[Worker]:
        return [worker for worker in self.all if worker.is_up]

    def set(self, urls: Mapping[int, str]) -> None:
        """Have these workers, by rank, from now on. Raises ConfigError for a wrong address."""
        addresses = {rank: address_of(url) for rank, url in urls.items()}
        for rank, worker in list(self._workers.items()):
            if addresses.get(rank) != worker.address:
                self._watching.pop(rank).cancel()
                del self._workers[rank]
                worker.is_up = False
                worker.drop_connections()
        for rank, address in addresses.items():
            if rank not in self._workers:
                worker = self._workers[rank] = Worker(rank, address)
                self._watching[rank] = asyncio.create_task(self._watch(worker))

    def end_waiting(self) -> None:
        """Let no request wait for a worker from now on."""
        self._is_ending = True
        self._changed.set()

    async def close(self) -> None:
        tasks = list(self._watching.values())
        self.set({})
        await asyncio.gather(*tasks, return_exceptions=True)

    async def find(
        self, choose: Callable[[Sequence[Worker]], Worker], tried: Collection[Worker], until: float
    ) -> Worker:
        """Return the worker that `choose` takes of those that are up and not `tried`; of all that are up if none is.

        Waits for one until `until`, a time of the event loop. Raises NoWorker.
        """
        return choose(await self.wait_for(lambda up: [one for one in up if one not in tried] or up, until))

    async def wait_for(self, wanted: Callable[[Sequence[Worker]], Sequence[Worker]], until: float) -> Sequence[Worker]:
        """Return what `wanted` finds among the workers that are up, as soon as it finds any. Raises NoWorker."""
        while not (found := wanted(self.up)):
            if self._is_ending:
                raise NoWorker
            self.num_waiting += 1
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError as error:
                raise NoWorker from error
            finally:
                self.num_waiting -= 1
        return found

    def lose(self, worker: Worker) -> None:
        """Take a worker out that has ended a connection or has answered 503, until it says that it is ready."""
        worker.is_up = False
        worker.look.set()

    async def _watch(self, worker: Worker) -> None:
        failures = 0
        while True:
            status = await _readiness(worker)
            if status == 200:
                failures = 0
                self._take_in(worker)
            else:
                failures += 1
                if worker.is_up and (status is None or failures >= MAX_FAILURES):
                    logger.warning("worker %d is away", worker.rank)
                    worker.is_up = False
                if status is None or (status == 0 and failures >= MAX_FAILURES):
                    worker.drop_connections()
            worker.look.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS_BETWEEN_LOOKS if worker.is_up else SECONDS_BETWEEN_LOOKS_AWAY):
                    await worker.look.wait()

    def _take_in(self, worker: Worker) -> None:
        if not worker.is_up:
            worker.is_up = True
            logger.info("worker %d is ready", worker.rank)
            self._changed.set()
            self._changed = asyncio.Event()


async def _readiness(worker: Worker) -> int | None:
    """Return the status of `/ready`; 0 if it does not come in time, None if nothing listens there."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            status, *_ = await worker.ask("GET", b"/ready")
            return status
    except TimeoutError:
        return 0
    except NotReached:
        return None
    except Lost:
        return 0
