"""A client that sends bytes as they are and reads whatever comes, also what an HTTP library would refuse to send."""

import asyncio
import re
from contextlib import suppress

SECONDS = 60.0
SECONDS_FOR_RUBBISH = 5.0
STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)
MAX_HEAD = 1 << 20


class RawClient:
    """One connection, opened when it is needed. Not for two requests at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, content: bytes) -> int | None:
        """The status of the answer, whose body is read to its end; None without an answer.

        Raises TimeoutError. A connection that the server has closed meanwhile is opened anew, once.
        """
        is_used = self._streams is not None
        async with asyncio.timeout(SECONDS):
            status = await self._answer(content)
            return await self._answer(content) if status is None and is_used else status

    async def throw(self, content: bytes) -> list[int]:
        """Send what need not be HTTP on a connection of its own; the statuses of all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = b""
        with suppress(ConnectionError, TimeoutError):
            writer.write(content)
            writer.write_eof()
            async with asyncio.timeout(SECONDS_FOR_RUBBISH):
                answer = await reader.read()
        writer.close()
        return [int(status) for status in STATUS.findall(answer)]

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _answer(self, content: bytes) -> int | None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=MAX_HEAD)
        reader, writer = self._streams
        try:
            writer.write(content)
            status, keeps = await read_answer(reader, has_body=not content.startswith(b"HEAD "))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            return None
        if not keeps:
            self.close()
        return status


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool) -> tuple[int, bool]:
    """Status, and whether the connection stays open. Raises IncompleteReadError, ConnectionError."""
    status, headers = 100, b""
    while status == 100:
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = int(head.split(b" ", 2)[1]), head.lower()
    if has_body:
        if b"transfer-encoding: chunked" in headers:
            await read_chunks(reader)
        elif length := re.search(rb"content-length: (\d+)", headers):
            await reader.readexactly(int(length[1]))
        else:
            await reader.read()
    return status, b"connection: close" not in headers


async def read_chunks(reader: asyncio.StreamReader) -> None:
    size = -1
    while size:
        size = int(await reader.readline(), 16)
        await reader.readexactly(size + 2)
