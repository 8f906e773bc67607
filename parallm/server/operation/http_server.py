"""The uvicorn server around an application. The caller starts it, stops it and owns the signals.

A `Listener` exists before the model is loaded, so that a wrong address or key costs no time; an `HttpServer` answers
on it.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from parallm.server.operation.auth import StoredKey, read_keys
from parallm.server.operation.connections import Connections, HttpConnection
from parallm.server.operation.middleware import Drain
from parallm.server.operation.sockets import bind, connection_limit
from parallm.server.settings import ServerSettings

LAST_BYTES_SECONDS = 1
"""Time for connections to close after the last answer."""
KEEP_ALIVE_SECONDS = 75  # longer than the pools of common clients, so that they and not we close idle connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound address, to which clients can connect though nothing answers yet, and the keys."""

    bound: socket.socket | None
    """None: nothing listens; the keys are for a server that starts later."""
    keys: tuple[StoredKey, ...]


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[Listener | None]:
    """Bind the port and read the keys; None without a server. Raises ListenError, ConfigError."""
    if not settings.enabled:
        yield None
        return
    keys = read_keys(settings)
    with bind(settings) as bound:
        yield Listener(bound=bound, keys=keys)


def local_only(settings: ServerSettings) -> Listener:
    """Answer only this process, until a server starts. Raises ConfigError for keys that cannot be read."""
    return Listener(bound=None, keys=read_keys(settings))


class HttpServer:
    """Serves `app` on `bound` from `start` to `stop`, on the running event loop. Installs no signal handlers."""

    def __init__(self, app: FastAPI, bound: socket.socket, settings: ServerSettings) -> None:
        self._app = app
        self._drain: Drain = app.state.drain
        self._settings = settings
        self._socket = bound
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

        self.url = _url(bound, settings)

    async def start(self) -> None:
        """Return when requests are answered."""
        self._drain.cancel()  # an earlier server of the same application has begun it
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
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
        is_running = self._task is not None and not self._task.done()
        if is_running and not await self._drain.wait_until_empty(self._settings.drain_seconds):
            self._drain.cut_off()
            await self._drain.wait_until_empty(LAST_BYTES_SECONDS)
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
        await self.wait()
        if self._settings.uds:
            Path(self._settings.uds).unlink(missing_ok=True)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # a request that outlives the drain: uvicorn closes the connection, and prints a traceback if we raise
            if not self._server.should_exit:
                raise


def _url(bound: socket.socket, settings: ServerSettings) -> str:
    if settings.uds:
        return f"unix:{settings.uds}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, since Ctrl-C belongs to the trainer, and with our `Connections`."""

    def __init__(self, config: uvicorn.Config, settings: ServerSettings) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._settings = settings
        self._connections: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        assert sockets, "the caller has bound the socket"
        connections = Connections(
            self._connection,
            limit=connection_limit(self._settings),
            stall_seconds=self._settings.stall_seconds,
            tls=self.config.ssl,
        )
        self._connections = asyncio.create_task(connections.run(sockets[0]))
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

    def _connection(self, on_lost: Callable[[HttpConnection], None]) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state, on_lost)
