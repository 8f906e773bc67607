"""What the methods of a model share: the application, the server that is open on it, and how adapters come in."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI

from parallm.errors import Unavailable
from parallm.library.local import LocalClient
from parallm.server.operation.listen import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard


@dataclass(slots=True, kw_only=True)
class Session:
    """Used on the event loop of its runtime."""

    app: FastAPI
    local: LocalClient
    settings: ServerSettings
    give: Callable[[str, str], Awaitable[AdapterCard]]
    """Serve the adapter, run or checkpoint at a path as the next version of a name."""
    server: HttpServer | None = None

    async def listen(self, settings: ServerSettings) -> HttpServer:
        """Answer HTTP from now on. Raises ListenError, and Unavailable where HTTP is answered already."""
        if self.server is not None:
            raise Unavailable(f"HTTP is answered at {self.server.url} already; close that server first")
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
