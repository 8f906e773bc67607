"""HTTP/1.1 connections from the front to a worker: a request out, the head of an answer and its bytes in.

Requests have been parsed and checked by the front's server, and workers are servers of ours, so little is left to read.
httpx costs a request three times what the whole front may add (0.3 ms), and h11 a third of it.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from parallm.errors import ConfigError

Headers = Sequence[tuple[bytes, bytes]]
CONNECT_SECONDS = 5.0
MAX_UNREAD = 1 << 18
"""Bytes of an answer that wait for the client; beyond it the worker waits."""
MAX_HEAD, MAX_LINE = 1 << 16, 1 << 12
Framing = Literal["none", "length", "chunks", "end"]
"""How an answer ends: it has no body, a length, a last chunk, or it ends with its connection."""


class Lost(Exception):
    """The worker ended the connection before its answer was whole."""


class NotReached(Lost):
    """There was no connection, so the worker has seen nothing of the request."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a worker. Example: `address_of("http://10.0.0.3:8001")`."""

    host: str
    """A name or an IP address; the path of a unix socket if `port` is None."""
    port: int | None
    tls: bool = False

    @property
    def authority(self) -> bytes:
        """Value of the header Host."""
        if self.port is None:
            return b"localhost"
        return (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}").encode()


def address_of(url: str) -> Address:
    """Return the address of `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url} is no address of a worker: {error}") from error
    if parts.scheme == "unix" and parts.path:
        return Address(unquote(parts.path), None)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{url} is no address of a worker; give http://HOST:PORT, https://HOST:PORT or unix:PATH")
    is_secret = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if is_secret else 80), is_secret)


class Connection(asyncio.Protocol):
    """One connection, for one request at a time. Reads answers of a known length, in chunks, or up to the end."""

    def __init__(self) -> None:
        self.is_fresh = True
        """Whether no request has used it before: a worker may close an idle connection just as a request comes."""
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._unread = bytearray()
        self._is_lost = False
        self._has_head_only = False
        self._framing: Framing = "none"
        self._remaining = 0
        """Bytes to come of the body, or of the present chunk."""
        self._is_after_chunk = False
        """Whether the line end of a chunk comes next."""
        self._is_whole = True
        """Whether the answer has come to its end."""
        self._is_kept = True
        """Whether the worker keeps the connection after it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) > MAX_UNREAD and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._wake()

    @property
    def is_idle(self) -> bool:
        """Whether it can take another request."""
        return not self._is_lost and self._is_whole and not self._unread

    def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Write a whole request. `headers` are those of a request that was parsed, and name a body's length.

        Raises Lost.
        """
        if self._transport is None or self._is_lost:
            raise Lost
        lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        self._transport.write(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method.encode(), target, lines, body))
        self._has_head_only, self._is_whole = method == "HEAD", False

    async def head(self) -> tuple[int, Headers]:
        """Wait for the status and the headers of the answer, names in small letters. Raises Lost."""
        while True:
            lines = (await self._upto(b"\r\n\r\n")).split(b"\r\n")
            version, _, rest = lines[0].partition(b" ")
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
                raise Lost
            status = int(rest[:3])
            if status >= 200:
                break
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines[1:])]
        fields = dict(headers)
        length, coding = fields.get(b"content-length", b""), fields.get(b"transfer-encoding", b"").lower()
        self._is_kept = version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
        if self._has_head_only or status in (204, 304):
            self._framing, self._is_whole = "none", True
        elif coding:
            self._framing, self._remaining, self._is_after_chunk = "chunks", 0, False
            if coding != b"chunked":
                raise Lost
        elif length:
            if not length.isdigit():
                raise Lost
            self._framing, self._remaining = "length", int(length)
            self._is_whole = self._remaining == 0
        else:
            self._framing, self._is_kept = "end", False
        return status, headers

    async def read(self) -> bytes:
        """Return the bytes of the body that have come, at least one; none at its end. Raises Lost."""
        while not self._is_whole:
            if data := self._take_chunks() if self._framing == "chunks" else self._take():
                return data
            if self._framing == "end" and self._is_lost:
                self._is_whole = True
            elif not self._is_whole:
                await self._more()
        return b""

    async def whole(self) -> bytes:
        """Return the body to its end. Raises Lost."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def finish(self) -> bool:
        """Make ready for another request after a whole answer; close it otherwise. Return whether it is ready."""
        self.is_fresh = False
        if not (self._is_kept and self.is_idle):
            self.close()
        return not self._is_lost

    def close(self) -> None:
        self._is_lost = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _take(self) -> bytes:
        data = bytes(self._unread)
        self._unread.clear()
        if self._framing == "length":
            self._remaining -= len(data)
            self._is_whole = self._remaining == 0
            if self._remaining < 0:
                raise Lost
        return data

    def _take_chunks(self) -> bytes:
        """Return the data of all chunks that have come, also of a part of the last one. Raises Lost."""
        unread, at, parts = self._unread, 0, []
        while True:
            if self._remaining:
                part = bytes(unread[at : at + self._remaining])
                parts.append(part)
                at += len(part)
                self._remaining -= len(part)
                if self._remaining:
                    break
                self._is_after_chunk = True
            start = at + 2 if self._is_after_chunk else at
            end = unread.find(b"\r\n", start)
            if end < 0:
                if len(unread) > start + MAX_LINE:
                    raise Lost
                break
            size = self._size(bytes(unread[start:end]))
            if size == 0:
                stop = unread.find(b"\r\n\r\n", end)  # after fields that may follow the last chunk
                if stop >= 0:
                    at, self._is_whole, self._is_after_chunk = stop + 4, True, False
                break
            at, self._remaining, self._is_after_chunk = end + 2, size, False
        del unread[:at]
        return b"".join(parts)

    def _size(self, line: bytes) -> int:
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError as error:
            raise Lost from error

    async def _upto(self, mark: bytes) -> bytes:
        """Take what comes before `mark`, and the mark. Raises Lost."""
        while (end := self._unread.find(mark)) < 0:
            if len(self._unread) > MAX_HEAD:
                raise Lost
            await self._more()
        taken = bytes(self._unread[:end])
        del self._unread[: end + len(mark)]
        return taken

    async def _more(self) -> None:
        """Wait for more bytes. Raises Lost if none will come."""
        if self._is_lost or self._transport is None:
            raise Lost
        if not self._transport.is_reading():
            self._transport.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(address: Address) -> Connection:
    """Raises NotReached."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if address.port is None:
                _, connection = await loop.create_unix_connection(Connection, address.host)
            else:
                tls = ssl.create_default_context() if address.tls else None
                _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=tls)
    except (OSError, TimeoutError) as error:
        raise NotReached(str(error)) from error
    return connection
