"""Small messages between workers: TCP connections of all ranks with rank 0. Imports no MLX.

Collectives of mx.distributed have no time limits, and one whose peer was killed may never return. So everything but
gradients goes over these connections, whose ends are known at once: the kernel closes those of a killed process.

A frame is a header (length of label, length of content), the label and the content. Messages have labels, so it does
not matter in which order ranks begin them.
"""

import logging
import math
import queue
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from parallm.distributed.identity import Address
from parallm.errors import ExchangeFailed

logger = logging.getLogger(__name__)

HEADER = struct.Struct(">IQ")
LENGTH = struct.Struct(">Q")
LEAVE, FAIL = "!leave", "!fail"
"""Labels of a worker's last frame, and of rank 0's word that the exchange has failed; the content is the reason."""
BROADCAST, POST = "!all", "!post"
"""Labels of what rank 0 sends to all, and of what one rank sends to rank 0."""
HELLO = "hello"
"""Label of a worker's first frame."""
MAX_LABEL, MAX_CONTENT, MAX_HELLO = 1 << 12, 1 << 36, 1 << 24
POLL_SECONDS = 0.2
CLOSE_SECONDS = 5.0
GREETING_SECONDS = 5.0
"""Time limit of a worker's first frame."""


@dataclass(slots=True)
class _Wait:
    """A future that must be done by `deadline` on the monotonic clock."""

    future: Future[list[bytes]] = field(default_factory=Future)
    deadline: float = math.inf
    """Infinite until this rank asks, too."""
    parts: dict[int, bytes] = field(default_factory=dict)
    """Messages that have come from the ranks so far, at rank 0."""
    then: Callable[[list[bytes]], object] | None = None
    """Called with the parts, whether `future` was cancelled or not."""
    guards: Future[Any] | None = None
    """The future of the block whose time this entry limits; see `guarded`."""
    began: float = field(default_factory=time.monotonic)

    @property
    def is_needed(self) -> bool:
        """Whether neither future was cancelled."""
        return not self.future.cancelled() and (self.guards is None or not self.guards.cancelled())

    def end(self, parts: list[bytes]) -> None:
        if self.then is not None:
            self.then(parts)
        settle(self.future, parts)


class Link:
    """One connection. A thread reads frames and another one writes them, so no caller ever blocks."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        """The rank at the other end."""
        self.has_left = False
        self._connection = connection
        self._frames: queue.SimpleQueue[tuple[str, bytes] | threading.Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to rank {rank}", daemon=True)

    def start(self, receive: Callable[["Link", str, bytes], None], lost: Callable[["Link"], None]) -> None:
        """Call `receive` for each frame, and `lost` when the connection ends. Both in a thread of the link."""
        self._connection.settimeout(None)
        self._writer.start()
        threading.Thread(target=self._read, args=(receive, lost), name=f"from rank {self.rank}", daemon=True).start()

    def send(self, label: str, content: bytes) -> None:
        """Queue a frame."""
        self._frames.put((label, content))

    def flush(self) -> None:
        """Wait until the system has what is queued, at most for a few seconds."""
        written = threading.Event()
        self._frames.put(written)
        written.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """Write what is queued, at most for a few seconds, and close the connection."""
        self._frames.put(None)
        if self._writer.is_alive() and threading.current_thread() is not self._writer:
            self._writer.join(CLOSE_SECONDS)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            if isinstance(frame, threading.Event):
                frame.set()
                continue
            with suppress(OSError):  # the reader sees the end of the connection, too
                write_frame(self._connection, *frame)

    def _read(self, receive: Callable[["Link", str, bytes], None], lost: Callable[["Link"], None]) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                receive(self, *read_frame(self._connection))
        lost(self)


class Channel:
    """Gathers bytes of all ranks. Methods may be called from any thread.

    The first failure ends the exchange: whatever waits then, and all later calls, get ExchangeFailed.
    """

    def __init__(self, rank: int, links: Sequence[Link], *, size: int, timeout_seconds: float) -> None:
        """`links`: at rank 0 one to each other rank, elsewhere the one to rank 0. Reading begins at once."""
        self.rank = rank
        self.size = size
        self.failure: str | None = None
        """Why the exchange has ended."""
        self.on_failure: Callable[[str], None] = lambda _: None
        """Called with the reason when the exchange has ended before its time."""
        self.broadcasts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """The next payload that rank 0 sent by `broadcast`, in order; None: rank 0 or the exchange has ended."""
        self._posts: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self.late_seconds: defaultdict[int, float] = defaultdict(float)
        """At rank 0: how much later than the first each rank came to gathers at which it was the last."""
        self._links = {link.rank: link for link in links}
        self._timeout = timeout_seconds
        self._waits: dict[str, _Wait] = {}
        self._lock = threading.RLock()
        self._is_closed = self._is_finished = False
        self._watch = threading.Thread(target=self._watch_deadlines, name="watchdog", daemon=True)
        self._watch.start()
        for link in links:
            link.start(self._receive, self._lose)

    def gather(
        self, label: str, part: bytes, then: Callable[[list[bytes]], object] | None = None
    ) -> Future[list[bytes]]:
        """Return the parts that all ranks give under this label, in the order of ranks.

        All ranks must use the same labels; a label may be used again when its future is done. `then` is called with the
        parts as soon as they are here, by one thread after the other: all ranks hear of several gathers in one order.
        """
        with self._lock:
            wait = self._waits.setdefault(label, _Wait())
            wait.then = then
            wait.deadline = time.monotonic() + self._timeout
            if self.failure is not None:
                settle(wait.future, error=ExchangeFailed(self.failure))
            elif self.rank == 0:
                self._arrive(0, label, part)
            elif self._links[0].has_left:
                self.fail("rank 0 ended before the others")
            else:
                self._links[0].send(label, part)
        return wait.future

    def broadcast(self, content: bytes) -> None:
        """Send bytes from rank 0 to all others, which get them in the order of the calls. Waits for nothing."""
        for link in self._links.values():
            link.send(BROADCAST, content)

    def post(self, content: bytes) -> None:
        """Send bytes from another rank to rank 0. Waits for nothing."""
        self._links[0].send(POST, content)

    def take_post(self, seconds: float) -> tuple[int, bytes | None] | None:
        """Return a rank and what it has posted, at rank 0, in the order of arrival; None in its place after the last.

        Returns None if nothing comes in this time.
        """
        with suppress(queue.Empty):
            return self._posts.get(timeout=seconds) if seconds > 0 else self._posts.get_nowait()
        return None

    def finish(self) -> None:
        """Need no other rank from now on: that one ends is no failure. Posts still come and go."""
        self._is_finished = True

    def meet(self, label: str) -> None:
        """Return when all ranks have called this, with what they were sent on its way. Raises ExchangeFailed."""
        self.gather(label, b"").result()
        for link in self._links.values():
            link.flush()

    def loss(self) -> Future[list[bytes]]:
        """Return a future that gets ExchangeFailed when the exchange ends, and no result. Cancel it after use."""
        wait = _Wait()
        with self._lock:
            if self.failure is not None:
                settle(wait.future, error=ExchangeFailed(self.failure))
            else:
                self._waits[f"loss {id(wait)}"] = wait
        return wait.future

    def await_failure(self, seconds: float) -> None:
        """Return when the exchange has ended, or after this time."""
        loss = self.loss()
        with suppress(ExchangeFailed, TimeoutError):
            loss.result(seconds)
        loss.cancel()

    @contextmanager
    def guarded(self, label: str, future: Future[Any]) -> Iterator[None]:
        """Fail the exchange, and `future` with it, if the block takes longer than the time limit."""
        wait = _Wait(deadline=time.monotonic() + self._timeout, guards=future)
        wait.future.add_done_callback(lambda done: settle(future, error=done.exception()))
        with self._lock:
            if self.failure is not None:
                raise ExchangeFailed(self.failure)
            self._waits[label] = wait
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(label, None)

    def fail(self, reason: str) -> None:
        """End the exchange here and, from rank 0, everywhere. The first reason counts."""
        with self._lock:
            if self.failure is not None or self._is_closed or self._is_finished:
                return
            self.failure = reason
            waits, self._waits = self._waits, {}
            for link in self._links.values():
                link.send(FAIL, reason.encode())
        logger.error("%s", reason)
        self.broadcasts.put(None)
        for rank in self._links:
            self._posts.put((rank, None))
        self.on_failure(reason)
        for wait in waits.values():
            settle(wait.future, error=ExchangeFailed(reason))

    def close(self, reason: str = "") -> None:
        """Say goodbye, with a reason if the run has not come to its end, and close all connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for link in self._links.values():
            link.send(LEAVE, reason.encode())
        for link in self._links.values():
            link.close()

    def _pending(self) -> list[tuple[str, _Wait]]:
        """Replies that this rank waits for; drops those that it has given up and has no use for."""
        given_up = [label for label, wait in self._waits.items() if wait.future.cancelled()]
        for label in given_up:
            if self._waits[label].then is None:
                del self._waits[label]
            else:
                self._waits[label].deadline = math.inf
        return [(label, wait) for label, wait in self._waits.items() if wait.deadline < math.inf]

    def _arrive(self, rank: int, label: str, part: bytes) -> None:
        """Take the part of a rank, at rank 0, with the lock held."""
        wait = self._waits.setdefault(label, _Wait())
        wait.parts[rank] = part
        if gone := [link.rank for link in self._links.values() if link.has_left and link.rank not in wait.parts]:
            self.fail(f"{_ranks(gone)} ended before the others")
        elif len(wait.parts) == self.size:
            del self._waits[label]
            self.late_seconds[rank] += time.monotonic() - wait.began
            parts = [wait.parts[rank] for rank in range(self.size)]
            joined = b"".join([LENGTH.pack(len(part)) + part for part in parts])
            for link in self._links.values():
                link.send(label, joined)
            self._renew_deadlines()
            wait.end(parts)

    def _receive(self, link: Link, label: str, content: bytes) -> None:
        """Handle a frame. Runs in the link's thread."""
        if label == BROADCAST:
            self.broadcasts.put(content)
            return
        if label == POST:
            self._posts.put((link.rank, content))
            return
        with self._lock:
            if label == FAIL:
                self.fail(content.decode())
            elif label == LEAVE:
                self._part_from(link, content.decode())
            elif self.rank == 0:
                self._arrive(link.rank, label, content)
            elif (wait := self._waits.pop(label, None)) is not None:
                self._renew_deadlines()
                wait.end(list(_split(content)))

    def _renew_deadlines(self) -> None:
        """Give each open gather its whole time again. All ranks have just answered another one, and a rank may come
        late to that of a step ahead."""
        deadline = time.monotonic() + self._timeout
        for _, wait in self._pending():
            wait.deadline = deadline

    def _part_from(self, link: Link, reason: str) -> None:
        link.has_left = True
        self._posts.put((link.rank, None))
        if reason:
            self.fail(f"rank {link.rank} has ended: {reason}")
        elif any(wait.is_needed for _, wait in self._pending()):
            self.fail(f"rank {link.rank} ended before the others")
        self.broadcasts.put(None)

    def _lose(self, link: Link) -> None:
        """Called when a connection has ended. Runs in the link's thread."""
        with self._lock:
            if not link.has_left:
                link.has_left = True
                self._posts.put((link.rank, None))
                self.fail(f"rank {link.rank} is gone: its connection has ended without a word")

    def _watch_deadlines(self) -> None:
        while not self._is_closed and self.failure is None:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            with self._lock:
                late = [(label, wait) for label, wait in self._pending() if wait.deadline < now]
                for label, wait in late:
                    missing = [rank for rank in range(self.size) if rank not in wait.parts]
                    who = f", which waited for {_ranks(missing)}" if self.rank == 0 and wait.parts else ""
                    self.fail(f"no answer in {self._timeout:g} seconds (distributed.timeout_seconds) to {label}{who}")


def listen(address: Address, size: int, timeout_seconds: float) -> list[tuple[socket.socket, bytes]]:
    """Accept the connection of each other rank; return connections with their first frames' contents.

    Each is greeted in a thread of its own, and closed with a warning if it is no worker's. Raises ExchangeFailed if the
    port is taken, or if some do not come in time.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    arrived: list[tuple[socket.socket, bytes]] = []
    deadline = time.monotonic() + timeout_seconds
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
            listener.listen(size)
            listener.settimeout(POLL_SECONDS)
            while len(arrived) < size - 1:
                if time.monotonic() > deadline:
                    raise ExchangeFailed(
                        f"{size - 1 - len(arrived)} of {size} workers have not come to {address} in "
                        f"{timeout_seconds:g} seconds"
                    )
                with suppress(TimeoutError, ConnectionAbortedError):
                    connection, peer = listener.accept()
                    threading.Thread(target=_greet, args=(connection, peer[0], arrived), daemon=True).start()
        except OSError as error:
            raise ExchangeFailed(f"rank 0 cannot listen at {address}: {error}") from error
    return arrived[: size - 1]


def connect(address: Address, hello: bytes, timeout_seconds: float) -> tuple[socket.socket, bytes]:
    """Connect to rank 0, which may come later; return the connection and rank 0's first frame.

    Raises ExchangeFailed if rank 0 does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), max(0.01, deadline - time.monotonic()))
            _keep_alive(connection)
            write_frame(connection, HELLO, hello)
            return connection, read_frame(connection)[1]
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise ExchangeFailed(f"rank 0 does not answer at {address}: {error}") from error
            time.sleep(POLL_SECONDS)


def write_frame(connection: socket.socket, label: str, content: bytes) -> None:
    encoded = label.encode()
    connection.sendall(HEADER.pack(len(encoded), len(content)) + encoded)
    connection.sendall(content)


def read_frame(connection: socket.socket, max_content: int = MAX_CONTENT) -> tuple[str, bytes]:
    """Raises EOFError at the end of the connection, ValueError for what is no frame."""
    label_length, length = HEADER.unpack(_exactly(connection, HEADER.size))
    if label_length > MAX_LABEL or length > max_content:
        raise ValueError("not a frame")
    return _exactly(connection, label_length).decode(), _exactly(connection, length)


def _greet(connection: socket.socket, host: str, arrived: list[tuple[socket.socket, bytes]]) -> None:
    """Append the connection and the content of its first frame to `arrived`, or close it."""
    try:
        connection.settimeout(GREETING_SECONDS)
        _keep_alive(connection)
        label, content = read_frame(connection, MAX_HELLO)
        if label != HELLO:
            raise ValueError("not a hello")
    except (OSError, EOFError, ValueError) as error:
        logger.warning("a connection from %s is closed, it is no worker's: %s", host, str(error) or "it has ended")
        connection.close()
        return
    arrived.append((connection, content))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    view, filled = memoryview(content), 0
    while filled < count:
        received = connection.recv_into(view[filled:])
        if not received:
            raise EOFError
        filled += received
    return bytes(content)


def _split(joined: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(joined):
        (length,) = LENGTH.unpack_from(joined, start)
        start += LENGTH.size
        yield joined[start : start + length]
        start += length


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def settle(future: Future[Any], result: list[bytes] | None = None, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
