"""The state behind the methods of a model: the application and the open server."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from parallm.errors import ConfigError, Unavailable
from parallm.library.local import LocalClient
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard


@dataclass(slots=True, kw_only=True)
class Session:
    """The application of a loaded model. Used on the event loop of its thread."""

    app: FastAPI
    local: LocalClient
    settings: ServerSettings
    give: Callable[[str, str], Coroutine[Any, Any, AdapterCard]]
    """Serves the adapter, run or checkpoint at a path as the next version of a name."""
    server: HttpServer | None = None

    async def listen(self, host: str | None, port: int | None) -> HttpServer:
        """Answer HTTP from now on; the settings have the address if it is None.

        Raises ConfigError, ListenError, and Unavailable if a server is open already.
        """
        if self.server is not None:
            raise Unavailable(f"HTTP is answered at {self.server.url} already; close that server first")
        settings = _at(self.settings, host, port)
        self.server = server = HttpServer(self.app, bind(settings), settings)
        await server.start()
        return server

    async def stop_listening(self, server: HttpServer) -> None:
        if self.server is server:
            await server.stop()
            self.server = None

    async def close(self) -> None:
        if self.server is not None:
            await self.stop_listening(self.server)
        await self.local.close()


def _at(settings: ServerSettings, host: str | None, port: int | None) -> ServerSettings:
    if not settings.enabled:
        raise ConfigError("server.enabled=false forbids to answer HTTP; leave it out to call serve()")
    try:
        return replace(
            settings, host=settings.host if host is None else host, port=settings.port if port is None else port
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{wrong['loc'][0]} is {wrong['input']!r}: {wrong['msg']}") from error
