"""What a server needs before there is something to serve: the bound address and the keys."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parallm.server.operation.keys import StoredKey, read_keys
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """An address that clients can connect to, though nothing answers yet."""

    bound: socket.socket | None
    """None: nothing listens; keys count for a server that starts later."""
    keys: tuple[StoredKey, ...]


@contextmanager
def listening(settings: ServerSettings) -> Iterator[Listening | None]:
    """Bind the port, so that a wrong address costs no time; None without a server. Raises ListenError, ConfigError."""
    if not settings.enabled:
        yield None
        return
    keys = read_keys(settings)
    with bind(settings) as bound:
        yield Listening(bound=bound, keys=keys)


def local_only(settings: ServerSettings) -> Listening:
    """Answer only this process, until a server starts. Raises ConfigError for keys that cannot be read."""
    return Listening(bound=None, keys=read_keys(settings))
