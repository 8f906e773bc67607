"""Sockets that a service manager has opened for this process: systemd's protocol, sd_listen_fds(3)."""

import os
import socket
from collections.abc import MutableMapping

from parallm.errors import ConfigError

FIRST = 3
"""Number of the first inherited file; the others follow."""
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
PROCESS, COUNT, NAMES = "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"


def inherited_sockets(environment: MutableMapping[str, str] = os.environ, first: int = FIRST) -> list[socket.socket]:
    """Take the listening sockets that were opened for this process; none if there are none, or the second time.

    Child processes get neither the sockets nor the variables. Raises ConfigError for what no server can listen on.
    """
    if environment.get(PROCESS) != str(os.getpid()):
        return []
    count = environment.get(COUNT, "")
    for name in (PROCESS, COUNT, NAMES):
        environment.pop(name, None)
    if not count.isdecimal():
        raise ConfigError(f"{COUNT}={count} is no number; the service manager sets it")
    taken = [_taken(descriptor) for descriptor in range(first, first + int(count))]
    for one in taken:
        _check(one)
    return taken


def _taken(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(
            f"{COUNT}: file {descriptor} is no socket ({error.strerror}); correct the socket unit"
        ) from error


def _check(one: socket.socket) -> None:
    is_stream = one.family in FAMILIES and one.type == socket.SOCK_STREAM
    if not (is_stream and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        raise ConfigError(
            f"{COUNT}: file {one.fileno()} is no listening stream socket; the socket unit needs ListenStream= and "
            "Accept=no"
        )
    if one.family == socket.AF_UNIX and not isinstance(one.getsockname(), str):
        raise ConfigError("a socket in the abstract namespace has no mode that protects it; give ListenStream= a path")
