"""What the front reads of a worker's answers, however their bytes are cut."""

import asyncio
from collections.abc import Sequence

import pytest

from parallm.distributed.front.connection import Address, Connection, Lost, NotReached, address_of, connect
from parallm.errors import ConfigError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=1\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"
END = b"HTTP/1.0 200 OK\r\n\r\nhello"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH


async def answer(pieces: Sequence[bytes], *, ends: bool = False, method: str = "GET") -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection can be used again, of an answer that comes in these pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not ends:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        connection = await connect(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        connection.send(method, b"/", [(b"host", b"a")], b"")
        try:
            status, headers = await connection.head()
            assert all(name == name.lower() for name, _ in headers)
            body = await connection.whole()
            return status, body, connection.finish()
        finally:
            connection.close()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("whole", [LENGTH, CHUNKS, CONTINUED], ids=["length", "chunks", "continued"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_answer_is_read_however_it_is_cut(whole: bytes, size: int) -> None:
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert asyncio.run(answer(pieces)) == (200, b"hello", True)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    assert asyncio.run(answer([END], ends=True)) == (200, b"hello", False)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_without_a_body_is_whole(status: bytes) -> None:
    assert asyncio.run(answer([b"HTTP/1.1 %b\r\n\r\n" % status]))[1:] == (b"", True)


def test_the_length_of_an_answer_to_head_is_not_that_of_a_body() -> None:
    assert asyncio.run(answer([LENGTH.partition(b"hello")[0]], method="HEAD")) == (200, b"", True)


def test_a_connection_that_the_worker_closes_is_not_used_again() -> None:
    assert asyncio.run(answer([LENGTH.replace(b"X-A:  b", b"Connection: close")]))[2] is False


@pytest.mark.parametrize(
    "broken",
    [
        LENGTH[:-2],
        LENGTH + b"more",
        CHUNKS[:-2],
        CHUNKS.replace(b"2;x=1", b"two"),
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,
        b"",
    ],
)
def test_what_is_no_whole_answer_counts_as_lost(broken: bytes) -> None:
    with pytest.raises(Lost):
        asyncio.run(answer([broken], ends=True))


def test_an_address_at_which_nothing_listens_is_not_reached() -> None:
    with pytest.raises(NotReached):
        asyncio.run(connect(Address("127.0.0.1", 1)))


def test_an_unread_answer_makes_the_worker_wait() -> None:
    async def run() -> int:
        num_sent = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while num_sent < 200:
                writer.write(b"x" * 100_000)
                await writer.drain()
                num_sent += 1
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            connection = await connect(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
            connection.send("GET", b"/", [], b"")
            await connection.head()
            await asyncio.sleep(0.5)
            sent_before = num_sent
            assert len(await connection.whole()) == 200 * 100_000
            connection.close()
            await asyncio.sleep(0.01)
            return sent_before

    assert asyncio.run(run()) < 150


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.3:8001", Address("10.0.0.3", 8001)),
        ("https://node", Address("node", 443, tls=True)),
        ("http://[::1]:8000/", Address("::1", 8000)),
        ("unix:/tmp/a.sock", Address("/tmp/a.sock", None)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert address_of(url) == address


@pytest.mark.parametrize("url", ["node:8000", "ftp://node", "http://node/v1", "http://node:x", "unix:"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a worker"):
        address_of(url)


def test_a_fresh_connection_is_idle() -> None:
    assert Connection().is_idle
