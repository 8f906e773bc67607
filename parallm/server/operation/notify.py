"""What systemd hears of this process, sd_notify(3): that it is ready, what it does, and that its device answers.

The variables of a service manager are taken once, so that child processes say nothing. Without them nothing happens.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress

SOCKET, INTERVAL, PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
SECONDS_BETWEEN_EXTENSIONS = 10.0
EXTENSION = "EXTEND_TIMEOUT_USEC=30000000"
"""More time to start, asked for every 10 s: a model may be large, or downloaded."""
SECONDS_BETWEEN_LOOKS = 5.0

logger = logging.getLogger(__name__)


class ServiceManager:
    """The manager that has started this process, if there is one."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address, interval = environment.pop(SOCKET, ""), environment.pop(INTERVAL, "")
        is_watched = environment.pop(PROCESS, str(os.getpid())) == str(os.getpid())
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watch_seconds = int(interval) / 1e6 if is_watched and interval.isdecimal() else None
        self._is_stopping = False

    @asynccontextmanager
    async def starting(self, what: str) -> AsyncIterator[None]:
        """Ask for more time until the end of the block."""
        async with self._beside(self._extend(what)):
            yield

    @asynccontextmanager
    async def running(self, ping: Callable[[], Awaitable[None]], status: Callable[[], str]) -> AsyncIterator[None]:
        """Tell that requests are answered, and what `status` returns; at the end that the process stops.

        The watchdog is fed each time `ping` has returned, which is when the device thread has answered: an event loop
        that lives over a dead device does not feed it.
        """
        self._send("READY=1", f"STATUS={status()}")
        async with self._beside(self._tell(status)), self._beside(self._feed(ping)):
            try:
                yield
            finally:
                self.stopping()

    def stopping(self) -> None:
        """Tell that the process stops. Can be called twice."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1", "STATUS=finishing the answers under way")

    @asynccontextmanager
    async def _beside(self, work: Awaitable[None]) -> AsyncIterator[None]:
        task = asyncio.ensure_future(work)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _extend(self, what: str) -> None:
        while self._address:
            self._send(EXTENSION, f"STATUS={what}")
            await asyncio.sleep(SECONDS_BETWEEN_EXTENSIONS)

    async def _tell(self, status: Callable[[], str]) -> None:
        last = status()
        while self._address:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if last != (last := status()) and not self._is_stopping:
                self._send(f"STATUS={last}")

    async def _feed(self, ping: Callable[[], Awaitable[None]]) -> None:
        while self._address and self._watch_seconds is not None:
            await ping()
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watch_seconds / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.connect(self._address)
                channel.sendall("\n".join(lines).encode())
        except OSError as error:
            logger.warning("the service manager at %s hears nothing: %s", self._address, error)
            self._address = ""
