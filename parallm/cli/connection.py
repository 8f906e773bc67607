"""The server that a command talks to: its address, its key, and errors as one line."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from parallm.cli.program import FAILED
from parallm.client.calls import ApiError, Call
from parallm.client.client import UNIX, Client
from parallm.user_folders import default_socket

HOST, KEY = "PARALLM_HOST", "PARALLM_API_KEY"
"""Environment variables of the server's address and of the key for it."""
USUAL = "http://127.0.0.1:8000"


class CommandFailed(Exception):
    """A command cannot be done; the message says why and the way out."""


def address_of(given: str | None) -> str:
    """Return the address of the server in the client's form; see `program.ADDRESS`."""
    text = given or os.environ.get(HOST)
    if not text:
        socket = default_socket()
        return f"{UNIX}{socket}" if socket.is_socket() else USUAL
    if text.startswith((UNIX, "http://", "https://")):
        return text
    if text.startswith(("/", "~", "./")):
        return f"{UNIX}{os.path.expanduser(text)}"  # noqa: PTH111  # a path in a text
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "8000"
    return f"http://{host or '127.0.0.1'}:{port}"


def connect(address: str, *, seconds: float | None = None) -> Client:
    """Return a client of the server, whose certificate is checked. Raises httpx.ConnectError where no socket is."""
    if address.startswith(UNIX) and not Path(address.removeprefix(UNIX)).is_socket():
        raise httpx.ConnectError("there is no socket")
    verify = None if address.startswith("https") else False
    key = os.environ.get(KEY, "").strip() or _owner_token(address)
    return Client(address, api_key=key, timeout=seconds, verify=verify)


def _owner_token(address: str) -> str | None:
    """Return the key beside a unix socket, which its owner can read where the server has keys."""
    if not address.startswith(UNIX):
        return None
    path = Path(f"{address.removeprefix(UNIX)}.token")
    return path.read_text().strip() if os.access(path, os.R_OK) else None


@contextmanager
def server(given: str | None, *, seconds: float | None = None) -> Iterator[Client]:
    """Connect to a server that answers within `seconds`. Raises CommandFailed for what it refuses, and if none is."""
    address = address_of(given)
    try:
        with connect(address, seconds=seconds) as client:
            yield client
    except ApiError as error:
        way_out = f"; set {KEY} to a key of this server" if error.status == 401 else ""
        raise CommandFailed(f"{error}{way_out}") from error
    except httpx.TimeoutException as error:
        raise CommandFailed(f"{address} takes too long to answer") from error
    except httpx.InvalidURL as error:
        raise CommandFailed(f"{address} is no address of a server: {error}") from error
    except httpx.HTTPError as error:
        raise CommandFailed(
            f"no server answers at {address} ({error}); start one with `parallm serve`, or name it with --host"
        ) from error


def get(path: str) -> Call[Any]:
    return Call("GET", path, lambda answer: answer)


def post(path: str, fields: dict[str, Any]) -> Call[Any]:
    return Call("POST", path, lambda answer: answer, fields)


def post_lines(path: str, fields: dict[str, Any]) -> Call[Any]:
    """Return a call that is answered by lines of JSON."""
    return Call("POST", path, lambda answer: answer, fields, has_lines=True)


def command(function: Callable[[Any], int]) -> Callable[[Any], int]:
    """Let a command end with one line and the exit code of a failure."""

    def run(arguments: Any) -> int:
        try:
            return function(arguments)
        except CommandFailed as error:
            for line in str(error).splitlines():
                sys.stderr.write(f"parallm: {line}\n")
            return FAILED

    return run


def write_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns two spaces apart; those without any value are left out."""
    kept = [index for index in range(len(titles)) if any(row[index] for row in rows)] or list(range(len(titles)))
    lines = [[line[index] or "-" for index in kept] for line in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(f"{'  '.join(cells).rstrip()}\n")
