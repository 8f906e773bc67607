"""The socket and the uvicorn server around an application. The caller starts it, stops it and owns the signals."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from parallm.errors import ParallmError
from parallm.server.doors import Doors
from parallm.server.settings import ServerSettings

LAST_BYTES_SECONDS = 1
"""For connections to close after the last answer."""
KEEP_ALIVE_SECONDS = 75  # longer than the pools of common clients, so that they and not we close idle connections


class ListenError(ParallmError):
    """The address cannot be used: another process has it, or it is not of this machine."""


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket on `host:port`; port 0 takes a free one. Raises ListenError with the way out.

    Apart from HttpServer so that a port in use can stop a run before a model is loaded. Clients that connect before the
    server starts wait.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"server.host={settings.host} is not an address of this machine: {error}") from error
    # `localhost` is often both; clients try 127.0.0.1
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    _check_exposure(settings, str(address[0]))
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # with SO_REUSEADDR two programs can bind, but only one can listen
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise _listen_error(settings, error) from error
    bound.setblocking(False)
    return bound


def _check_exposure(settings: ServerSettings, address: str) -> None:
    """Whoever can reach a server without keys can also train it, so it stays on this machine. Raises ListenError."""
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not is_local and settings.control_routes and not settings.api_keys:
        raise ListenError(
            f"server.host={settings.host} can be reached from other machines and there are no keys; name one with "
            "'server.api_keys=[{name: operator, role: admin, env: PARALLM_API_KEY}]', switch the routes that control "
            "training off with server.control_routes=false, or stay on this machine with server.host=127.0.0.1"
        )


def _listen_error(settings: ServerSettings, error: OSError) -> ListenError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return ListenError(
            f"{where} is in use by another process; choose another port with server.port=..., let the system choose "
            "with server.port=0, or run without HTTP: server.enabled=false"
        )
    return ListenError(f"cannot listen on {where}: {error}; change server.host=... or server.port=...")


class HttpServer:
    """Serves `app` on `bound` from `start` to `stop`, on the running event loop. Installs no signal handlers."""

    def __init__(self, app: FastAPI, bound: socket.socket, *, drain_seconds: float) -> None:
        self.host, self.port = bound.getsockname()[:2]
        self._app = app
        self._doors: Doors = app.state.doors
        self._drain_seconds = drain_seconds
        self._socket = bound
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                self._call,
                interface="asgi3",
                proxy_headers=False,
                log_config=None,  # logging is set up by the program
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            )
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Returns when requests are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Until the server has ended, by `stop` or by an error, which is raised."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def drain(self) -> None:
        """From now on new requests for completions get 503; those under way go on until `stop` is through."""
        self._doors.close()

    async def stop(self) -> None:
        """Refuse new requests, let answers end for `drain_seconds`, then cancel them. Can be called twice."""
        self.drain()
        if self._task is not None and not self._task.done():
            await self._doors.wait_until_empty(self._drain_seconds)
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
        await self.wait()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # what is left after the grace: uvicorn closes the connection, and prints a traceback if we raise
            if not self._server.should_exit:
                raise


async def serve(app: FastAPI, settings: ServerSettings) -> None:
    """Bind and serve until cancelled; then stop gracefully."""
    server = HttpServer(app, bind(settings), drain_seconds=settings.drain_seconds)
    await server.start()
    try:
        await server.wait()
    finally:
        await server.stop()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: Ctrl-C belongs to the trainer."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
