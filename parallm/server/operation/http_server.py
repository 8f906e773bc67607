"""The uvicorn server around an application, and its open connections. The caller starts it, stops it and owns signals.

A `Listener` exists before the model is loaded, so that a wrong address or key costs no time; an `HttpServer` answers
on it. uvicorn accepts every connection and closes only those that are idle after an answer. With enough of them no file
is left for a checkpoint, and asyncio's accept loop spins. `Connections` accepts in place of that loop, bounds their
number, and closes those whose clients stand still.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import h11
import uvicorn
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from parallm.server.connection import error_response
from parallm.server.failures import Failure
from parallm.server.operation.activation import inherited_sockets
from parallm.server.operation.auth import StoredKey, owner_key, read_keys
from parallm.server.operation.middleware import Drain
from parallm.server.operation.request_context import UNIX
from parallm.server.operation.sockets import BoundSocket, BoundSockets, bind, connection_limit
from parallm.server.settings import ServerSettings

Phase = Literal["head", "body", "answer", "unread", "leftover", "idle"]
"""The next event: the head of a request, its body, our answer, the client reading it, the remaining body of a request
that was answered early, another request."""

RESERVE = 16
"""Connections beyond the limit, which serve probes only."""
PROBES = ("/health", "/ready", "/metrics")
MAX_SECONDS: Mapping[Phase, float] = {"head": 20.0, "leftover": 5.0}
"""Seconds without progress. Bodies have a rate (`connection.py`), idle connections uvicorn's limit."""
DROP_ORDER: Mapping[Phase, int] = {"head": 0, "body": 0, "leftover": 0, "idle": 1, "unread": 2}
"""Order in which connections are dropped to make room. One that waits for an answer is never dropped."""
HANDSHAKE_SECONDS = 20.0
SECONDS_BETWEEN_SWEEPS = 1.0
SECONDS_BETWEEN_LOOKS = 0.02
"""Seconds between two looks at connections that are to end."""
SECONDS_BETWEEN_WARNINGS = 60.0
ACCEPTED_AT_ONCE = 32  # before other work of the event loop gets its turn
DROPPED_SHARE = 16  # up to a 16th of the limit at once, since each search for room looks at every connection
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LAST_BYTES_SECONDS = 1
"""Time for connections to close after the last answer, and without progress of their clients."""
WATCHER_SECONDS = 0.5
"""Time for watchers to get their last event; a client that takes nothing does not delay the end any longer."""
KEEP_ALIVE_SECONDS = 75  # longer than the pools of common clients, so that they and not we close idle connections

logger = logging.getLogger(__name__)


class HttpConnection(H11Protocol):
    """uvicorn's HTTP connection, which also says what it waits for and can be dropped.

    Made when a socket is accepted, before TLS. `opening` is the task that sets it up.
    """

    opening: asyncio.Task[None]

    def __init__(self, *arguments: Any, on_lost: Callable[["HttpConnection"], None]) -> None:
        super().__init__(*arguments)
        self.last_received = self.loop.time()
        """Time of the last bytes, on the clock of the event loop."""
        self._progress: object = None
        self._progressed = self.last_received
        self._is_open = False
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._is_open = True
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.last_received = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(self)

    @property
    def phase(self) -> Phase:
        if not self._is_open:
            return "head"
        if self.transport.is_closing() or self.flow.write_paused:
            return "unread"
        if self.conn.their_state is h11.IDLE:
            return "head" if self.cycle is None or self._has_begun else "idle"
        if self.conn.their_state is h11.SEND_BODY:
            return "leftover" if self.cycle.response_complete else "body"
        return "answer"

    def seconds_without_progress(self) -> float:
        """Return the seconds since the call that saw it get on for the last time. Called by each sweep."""
        num_unsent = self.transport.get_write_buffer_size() if self._is_open else 0
        progress, now = (self.phase, id(self.cycle), num_unsent), self.loop.time()
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        return now - self._progressed

    def time_out(self) -> None:
        """Close it, with a 408 if a request has begun."""
        if self._is_open and self.phase == "head":
            if self._has_begun:
                self.transport.write(TIMED_OUT)
            self.transport.close()
        else:
            self.drop()

    def drop(self) -> None:
        if self._is_open:
            self.transport.abort()
        else:
            self.opening.cancel()

    @property
    def _has_begun(self) -> bool:
        return bool(self.conn.trailing_data[0])


class Connections:
    """All connections of one listener, on the event loop only. `make` builds the connection of an accepted socket."""

    def __init__(
        self,
        make: Callable[..., HttpConnection],
        settings: ServerSettings,
        tls: ssl.SSLContext | None,
        owner_keys: tuple[StoredKey, ...],
    ) -> None:
        """`tls` is of addresses alone, `owner_keys` count over unix sockets alone."""
        self._make = make
        self._limit = connection_limit(settings)
        self._stall_seconds = settings.stall_seconds
        self._tls = tls
        self._owner_keys = owner_keys
        self._open: set[HttpConnection] = set()
        self._last_warning = float("-inf")

    async def run(self, listeners: Sequence[BoundSocket]) -> None:
        """Accept and sweep until cancelled; connections that are not open yet are dropped then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for listener in listeners:
                    tasks.create_task(self._accept(listener))
                tasks.create_task(self._sweep())
        finally:
            for connection in self._open:
                connection.opening.cancel()

    async def end(self, seconds: float) -> None:
        """Let clients take what they were answered for up to `seconds`. Those that take nothing for
        `LAST_BYTES_SECONDS` are dropped before. No connection is open when it returns."""
        until, num_dropped = asyncio.get_running_loop().time() + seconds, 0
        while self._open:
            is_over = asyncio.get_running_loop().time() > until
            for connection in list(self._open):
                if is_over or connection.seconds_without_progress() > LAST_BYTES_SECONDS:
                    self._forget(connection)
                    connection.drop()
                    num_dropped += 1
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)  # turns in which those that were dropped are closed, too
        if num_dropped:
            logger.info("%d connections were closed whose clients had not taken all of their answers", num_dropped)

    async def _accept(self, listener: BoundSocket) -> None:
        number, is_unix = 0, listener.path is not None
        while True:
            try:
                accepted, _ = listener.socket.accept()
            except BlockingIOError:
                await _readable(listener.socket)
                continue
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no file is left: other parts of the process have them, since ours are bounded
                self._warn(f"no connection can be accepted: {error}")
                await asyncio.sleep(SECONDS_BETWEEN_SWEEPS)
                continue
            accepted.setblocking(False)
            self._add(accepted, is_unix=is_unix)
            number += 1
            if number % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _add(self, accepted: socket.socket, *, is_unix: bool) -> None:
        tls = None if is_unix else self._tls
        if len(self._open) >= self._limit:
            self._make_room()
        if len(self._open) >= self._limit + RESERVE:
            _refuse(accepted, is_plain=tls is None)
            return
        connection = self._make(on_lost=self._forget)
        if is_unix:
            connection.app = _over_unix(connection.app, self._owner_keys)
        if len(self._open) >= self._limit:
            connection.app = _probes_only(connection.app)
        self._open.add(connection)
        connection.opening = asyncio.create_task(self._set_up(connection, accepted, tls))
        connection.opening.add_done_callback(lambda task: accepted.close() if task.cancelled() else None)

    async def _set_up(self, connection: HttpConnection, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        handshake = None if tls is None else HANDSHAKE_SECONDS
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=handshake
            )
        except (OSError, asyncio.CancelledError):  # no TLS, not in time, or dropped meanwhile: asyncio has closed it
            self._forget(connection)

    def _forget(self, connection: HttpConnection) -> None:
        self._open.discard(connection)

    def _make_room(self) -> None:
        """Drop several connections that wait for their clients, the longest first, to make room for the next few."""
        self._warn(
            f"{len(self._open)} connections are open, the limit: those that stand still are closed; "
            "raise server.max_connections if these are clients"
        )
        candidates = [connection for connection in self._open if connection.phase in DROP_ORDER]
        first = min((DROP_ORDER[connection.phase] for connection in candidates), default=0)
        candidates = [connection for connection in candidates if DROP_ORDER[connection.phase] == first]
        candidates.sort(key=lambda connection: connection.last_received)
        for connection in candidates[: max(1, self._limit // DROPPED_SHARE)]:
            self._forget(connection)
            connection.drop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_SWEEPS)
            for connection in list(self._open):
                phase = connection.phase
                limit = self._stall_seconds if phase == "unread" else MAX_SECONDS.get(phase, float("inf"))
                if connection.seconds_without_progress() > limit:
                    connection.time_out()

    def _warn(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._last_warning > SECONDS_BETWEEN_WARNINGS:
            self._last_warning = now
            logger.warning("%s", message)


async def _readable(listener: socket.socket) -> None:
    """Wait for a connection, without taking it: `sock_accept` would lose one that comes as its task is cancelled."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(listener, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(listener)


def _refuse(accepted: socket.socket, *, is_plain: bool) -> None:
    with contextlib.suppress(OSError):
        if is_plain:
            accepted.recv(65_536)  # closing with unread bytes would reset the connection before the refusal arrives
            accepted.send(REFUSAL)
    accepted.close()


def _over_unix(app: ASGIApp, keys: tuple[StoredKey, ...]) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[UNIX] = keys
        await app(scope, receive, send)

    return answer


def _probes_only(app: ASGIApp) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
            return
        refusal = Failure(
            503,
            "too_many_connections",
            "server_error",
            message="all connections of this server wait for answers; ask again later, or raise server.max_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )
        await error_response(refusal)(scope, receive, send)

    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound address, where clients wait for a server, and the keys of its application."""

    keys: tuple[StoredKey, ...]
    bound: BoundSockets | None = None
    """None if there is no server, or a later one that binds a port itself."""

    @property
    def url(self) -> str | None:
        """Address for programs."""
        return None if self.bound is None else self.bound.url

    @property
    def urls(self) -> str | None:
        """All addresses, for people."""
        return None if self.bound is None else self.bound.urls


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[Listener]:
    """Bind the sockets of an enabled server, or take those of a service manager, so that a wrong address fails early.

    Raises ListenError, ConfigError.
    """
    if not settings.enabled:
        yield Listener(keys=())
        return
    keys = read_keys(settings)
    with bind(settings, inherited_sockets()) as bound:
        yield Listener(keys=keys, bound=bound)


def local_only(settings: ServerSettings) -> Listener:
    """Return a listener for this process alone, until it binds a port. Raises ConfigError for unreadable keys."""
    return Listener(keys=read_keys(settings))


class Application(Protocol):
    """An ASGI application; `state.drain` is its `Drain`."""

    state: State

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class HttpServer:
    """Serves `app` on `bound` from `start` to `stop`, on the running event loop. Installs no signal handlers."""

    def __init__(
        self, app: Application, bound: BoundSockets, settings: ServerSettings, *, has_owner_key: bool = True
    ) -> None:
        """`has_owner_key`: where there are keys, the owner of a unix socket gets one that counts there alone."""
        self._app = app
        self._drain: Drain = app.state.drain
        self._settings = settings
        self._bound = bound
        self._has_owner_key = has_owner_key and bool(settings.api_keys)
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                self._call,
                interface="asgi3",
                http=HttpConnection,
                proxy_headers=False,
                log_config=None,  # logging is set up by the program
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_ca_certs=settings.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
            ),
            settings,
        )
        self.url = bound.url

    async def start(self) -> None:
        """Return when requests are answered."""
        self._drain.cancel()  # an earlier server of the same application has begun it
        token = self._bound.write_token() if self._has_owner_key else None
        self._server.accept(self._bound.sockets, () if token is None else (owner_key(token),))
        self._task = asyncio.create_task(self._server.serve())
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Wait until the server has ended, by `stop` or by an error, which is raised."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def drain(self) -> None:
        """Refuse new requests for completions with 503; those under way go on until `stop` is through."""
        self._drain.begin()

    async def stop(self) -> None:
        """Refuse new requests, let answers end for `drain_seconds`, then cut them off. Can be called twice."""
        self.drain()
        until = asyncio.get_running_loop().time() + self._settings.drain_seconds
        is_running = self._task is not None and not self._task.done()
        if is_running and not await self._drain.wait_until_empty(self._settings.drain_seconds):
            self._drain.cut_off()
            await self._drain.wait_until_empty(LAST_BYTES_SECONDS)
        if is_running:
            await self._drain.end_watchers(WATCHER_SECONDS)
        left = until - asyncio.get_running_loop().time()
        self._server.last_seconds = max(left, LAST_BYTES_SECONDS)
        self._server.should_exit = True
        await self.wait()
        self._bound.close()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # a request that outlives the drain: uvicorn closes the connection, and prints a traceback if we raise
            if not self._server.should_exit:
                raise


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, since Ctrl-C belongs to the trainer, and with our `Connections`."""

    def __init__(self, config: uvicorn.Config, settings: ServerSettings) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._settings = settings
        self.last_seconds: float = LAST_BYTES_SECONDS
        """Time for clients to take the answers that they have got when `shutdown` begins."""
        self._open: Connections | None = None
        self._connections: asyncio.Task[None] | None = None

    def accept(self, listeners: Sequence[BoundSocket], owner_keys: tuple[StoredKey, ...]) -> None:
        """Set where to listen, before `serve`."""
        self._listeners, self._owner_keys = listeners, owner_keys

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        make = partial(HttpConnection, self.config, self.server_state, self.lifespan.state)
        self._open = Connections(make, self._settings, self.config.ssl, self._owner_keys)
        self._connections = asyncio.create_task(self._open.run(self._listeners))
        self.ready.set()

    async def on_tick(self, counter: int) -> bool:
        """Raise what `Connections` raised: a server that accepts nothing must not look alive."""
        if self._connections is not None and self._connections.done():
            self._connections.result()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._connections is not None:
            self._connections.cancel()
            await asyncio.gather(self._connections, return_exceptions=True)
        await super().shutdown(sockets)
        if self._open is not None:  # uvicorn gives up on clients that are slow, and leaves their connections open
            await self._open.end(self.last_seconds)
