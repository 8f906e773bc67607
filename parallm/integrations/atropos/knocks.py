"""Listens for a while where environments ask that have dropped the URL of our server, to tell that they do."""

import asyncio
from contextlib import suppress

from parallm.integrations.atropos.diagnosis import DEFAULT_PORTS

LOOPBACK = "127.0.0.1"
SECONDS_TO_SAY = 2.0
PATHS = (b"/v1", b"/generate", b"/health", b"/chat", b"/completions")
"""What those ask for."""


class Knocks:
    """Answers nobody. For the asyncio thread."""

    def __init__(self, ports: tuple[int, ...] = DEFAULT_PORTS) -> None:
        self._ports = ports
        self._servers: list[asyncio.Server] = []
        self.heard: set[int] = set()
        self.taken: tuple[int, ...] = ()
        """Where another program listens."""

    async def open(self) -> None:
        """Listen, if it does not yet."""
        if self._servers or self.taken:
            return
        taken = []
        for port in self._ports:
            try:
                self._servers.append(await asyncio.start_server(self._hear, LOOPBACK, port))
            except OSError:
                taken.append(port)
        self.taken = tuple(taken)

    async def close(self) -> None:
        """Give the ports back; what was heard is forgotten."""
        for server in self._servers:
            server.close()
            await server.wait_closed()
        self._servers, self.taken = [], ()
        self.heard.clear()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TimeoutError, ConnectionError, ValueError):
            line = await asyncio.wait_for(reader.readline(), SECONDS_TO_SAY)
            if any(path in line for path in PATHS):
                self.heard.add(writer.get_extra_info("sockname")[1])
        writer.close()
