"""The front's process: `standing_front` for a launcher of workers, and `open_front` for a front alone.

The starter binds the address and keeps the socket, so that clients can connect before there is a front and while one
that has died is started again. It writes lines of JSON to the front's standard input: settings first, then the workers'
addresses whenever they change. The front ends when that input does, which no starter can fail to close.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from pydantic import TypeAdapter

from parallm.device.garbage import collect_rarely
from parallm.distributed.front.app import Front
from parallm.distributed.front.workers import Workers
from parallm.distributed.gang import Interrupts, NoFront
from parallm.distributed.identity import FRONT, LISTEN
from parallm.distributed.settings import FrontSettings
from parallm.server.operation.activation import inherited_sockets
from parallm.server.operation.auth import StoredKey, read_keys
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import BoundSocket, BoundSockets, bind
from parallm.server.settings import ServerSettings

CLOSE_SECONDS = 5.0
"""Time to end after the last answer."""
SECONDS_BETWEEN_STARTS = 1.0

logger = logging.getLogger(__name__)


class FrontProcess:
    """A front in a process of its own, which is started again if it dies."""

    def __init__(self, server: ServerSettings, settings: FrontSettings, bound: BoundSockets) -> None:
        self.url = bound.url
        self._descriptors = [one.socket.fileno() for one in bound.sockets]
        self._server = server
        self._first = {
            "server": TypeAdapter(ServerSettings).dump_python(server, mode="json"),
            "front": TypeAdapter(FrontSettings).dump_python(settings, mode="json"),
            "sockets": [{"fd": one.socket.fileno(), "url": one.url} for one in bound.sockets],
        }
        self._lock = threading.Lock()
        self._urls: dict[int, str] = {}
        self._is_closing = threading.Event()
        self._process = self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_workers(self, urls: Mapping[int, str]) -> None:
        """Name the workers by rank: `http://HOST:PORT` or `unix:PATH`. Those that are not named are forgotten."""
        with self._lock:
            self._urls = dict(urls)
            self._write(self._process, {"workers": self._urls})

    def assign(self, hosts: Sequence[str], ports: Sequence[int]) -> list[dict[str, str]]:
        """Have a worker at each of these addresses from now on. Return the environment that lets it listen there."""
        pairs = zip(hosts, ports, strict=True)
        names = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in pairs]
        self.set_workers({rank: f"http://{name}" for rank, name in enumerate(names)})
        return [{LISTEN: name, FRONT: self.url} for name in names]

    def drain(self) -> None:
        """Refuse new requests; those under way go on."""
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the front after the answers under way."""
        with self._lock:
            self._is_closing.set()
            process = self._process
            self._hang_up(process)
        try:
            process.wait(self._server.drain_seconds + CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _keep(self) -> None:
        """Start the front again whenever its process ends; clients that connect meanwhile wait."""
        while True:
            code = self._process.wait()
            if self._is_closing.wait(SECONDS_BETWEEN_STARTS):
                return
            logger.warning("the front has ended with %d and is started again", code)
            with self._lock:
                if not self._is_closing.is_set():
                    self._hang_up(self._process)
                    self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "parallm.distributed.front.process"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self._descriptors)
        self._write(process, self._first)
        self._write(process, {"workers": self._urls})
        return process

    def _hang_up(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "it was opened"
        with suppress(OSError):
            process.stdin.close()

    def _write(self, process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
        assert process.stdin is not None, "it was opened"
        with suppress(OSError):  # it has ended, and the next one gets all
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()


@contextmanager
def standing_front(
    server: ServerSettings, settings: FrontSettings, interrupts: Interrupts
) -> Iterator[FrontProcess | NoFront]:
    """A front on the address of `server`, if there is to be one; a signal to end lets it refuse new requests.

    Raises ListenError, ConfigError.
    """
    if not (server.enabled and settings.enabled):
        yield NoFront()
        return
    read_keys(server)
    with bind(server, inherited_sockets()) as bound:
        front = FrontProcess(server, settings, bound)
        interrupts.on_signal = front.drain
        try:
            yield front
        finally:
            front.close()


@asynccontextmanager
async def open_front(
    server: ServerSettings, settings: FrontSettings, keys: tuple[StoredKey, ...], bound: BoundSockets
) -> AsyncIterator[tuple[Workers, HttpServer]]:
    """Answer on `bound` for the yielded workers, of which there are none at first."""
    workers = Workers()
    # its keys are those of the workers, who know no other
    http = HttpServer(Front(workers, server, keys, settings.hold_seconds), bound, server, has_owner_key=False)
    gc.freeze()  # the modules, which no collection has to look at
    await http.start()
    try:
        yield workers, http
    finally:
        http.drain()
        workers.end_waiting()
        await http.stop()
        await workers.close()


async def _serve(lines: asyncio.StreamReader) -> None:
    first = json.loads(await lines.readline())
    server = TypeAdapter(ServerSettings).validate_python(first["server"])
    settings = TypeAdapter(FrontSettings).validate_python(first["front"])
    bound = BoundSockets([BoundSocket(socket.socket(fileno=one["fd"]), one["url"]) for one in first["sockets"]])
    for one in bound.sockets:
        one.socket.setblocking(False)
    async with open_front(server, settings, read_keys(server), bound) as (workers, http):
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches it, too; the workers still answer then
            loop.add_signal_handler(number, http.drain)
        while line := await lines.readline():
            workers.set({int(rank): url for rank, url in json.loads(line)["workers"].items()})


async def _run() -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await _serve(lines)


def main() -> None:
    """Run the front that a starter talks to on standard input."""
    logging.basicConfig(level=logging.WARNING, format="parallm: front: %(message)s")
    collect_rarely()
    asyncio.run(_run())
    os._exit(0)  # no thread of a library keeps it


if __name__ == "__main__":
    main()
