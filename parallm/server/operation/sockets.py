"""The listening sockets, TCP and unix, made before anything slow, so that a wrong address stops a run at once."""

import errno
import ipaddress
import logging
import os
import resource
import secrets
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from parallm.checkpoint.folder_lock import FolderLock
from parallm.errors import ConfigError, FolderInUse, ParallmError
from parallm.server.settings import AUTO, ServerSettings
from parallm.user_folders import default_socket

BACKLOG = 2048
DEFAULT_CONNECTIONS = 1000
FILES_FOR_OTHERS = 256
"""Open files for checkpoints, metrics, adapters, models and logs."""

MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""Length of a unix socket's path that the system can hold."""
OWNER_MODE = 0o600
UNIX = "unix:"

logger = logging.getLogger(__name__)


class ListenError(ParallmError):
    """The server cannot listen: a wrong or taken address, a wrong certificate, or too few open files."""


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """One listening socket, and the address that clients call."""

    socket: socket.socket
    url: str

    @property
    def path(self) -> Path | None:
        """Path of a unix socket."""
        return Path(self.url.removeprefix(UNIX)) if self.url.startswith(UNIX) else None


class BoundSockets:
    """The listening sockets of a server, those of addresses first, and what lies on disk for them until `close`."""

    def __init__(self, sockets: Sequence[BoundSocket], resources: ExitStack | None = None) -> None:
        """`resources` are closed after the sockets."""
        self.sockets = sorted(sockets, key=lambda one: one.path is not None)
        self._resources = resources or ExitStack()

    @property
    def url(self) -> str:
        """Address for programs."""
        return self.sockets[0].url

    @property
    def urls(self) -> str:
        """All addresses, for people."""
        return ", ".join(one.url for one in self.sockets)

    def write_token(self) -> str | None:
        """Write a new key to PATH.token beside each unix socket, for its owner alone; None without such a socket."""
        token, is_written = secrets.token_urlsafe(32), False
        for one in self.sockets:
            if one.path is not None:
                is_written |= self._write(one.path.with_name(f"{one.path.name}.token"), token)
        return token if is_written else None

    def _write(self, path: Path, token: str) -> bool:
        try:
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_MODE), "w") as file:  # noqa: PTH123
                file.write(token)
        except OSError as error:
            logger.warning("%s cannot be written (%s): over this socket only server.api_keys count", path, error)
            return False
        self._resources.callback(path.unlink, missing_ok=True)
        return True

    def close(self) -> None:
        """Close all sockets, never shut them down: a service manager may go on with them. Can be called twice."""
        for one in self.sockets:
            one.socket.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bind(settings: ServerSettings, inherited: Sequence[socket.socket] = ()) -> BoundSockets:
    """Return listening sockets on `host:port` and `uds`, or `inherited` ones in their place; port 0 takes a free one.

    Clients that connect before the server starts wait. Raises ListenError, ConfigError.
    """
    _check_certificates(settings)
    connection_limit(settings)
    if inherited:
        bound = BoundSockets([_adopted(settings, one) for one in inherited])
        logger.info("listening on %s of the service manager in place of server.host, port and uds", bound.urls)
    else:
        if settings.port is None and settings.uds is None:
            raise ConfigError("server.port=null and server.uds=null leave nothing to listen on; set one, or server=off")
        with ExitStack() as resources:
            sockets = []
            if settings.port is not None:
                sockets.append(resources.enter_context(_bind_tcp(settings, settings.port)))
            if settings.uds is not None:
                sockets.append(_bind_unix(settings, settings.uds, resources))
            bound = BoundSockets([_named(one, settings) for one in sockets], resources.pop_all())
    for one in bound.sockets:
        one.socket.setblocking(False)
    return bound


def socket_path(uds: str) -> Path:
    """Return the path of the unix socket that `server.uds` names. Raises ConfigError for a path that it cannot have."""
    if uds.startswith(("@", "\0")):
        raise ConfigError(f"server.uds={uds}: no mode protects a name in the abstract namespace; give a path")
    path = default_socket() if uds == AUTO else Path(uds)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"server.uds={path} has {len(os.fsencode(path))} bytes, and the system takes {MAX_PATH_BYTES}; choose a "
            "shorter path"
        )
    return path


def connection_limit(settings: ServerSettings) -> int:
    """Return how many connections may be open. Raises ListenError where the process may open fewer files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = settings.max_connections
    if files == resource.RLIM_INFINITY:
        return given or DEFAULT_CONNECTIONS
    if given is not None and given + FILES_FOR_OTHERS > files:
        raise ListenError(
            f"server.max_connections={given} needs {given + FILES_FOR_OTHERS} open files, and this process may have "
            f"{files}; raise that with `ulimit -n`, or set server.max_connections={max(1, files - FILES_FOR_OTHERS)}"
        )
    return given or min(DEFAULT_CONNECTIONS, max(1, files // 2))


def _bind_tcp(settings: ServerSettings, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"server.host={settings.host} is not an address of this machine: {error}") from error
    # `localhost` is often both; clients try 127.0.0.1
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    _check_exposure(settings, str(address[0]), f"server.host={settings.host}")
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # with SO_REUSEADDR two programs can bind, but only one can listen
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        where = f"{settings.host}:{port}"
        message = f"cannot listen on {where}: {error}; change server.host=... or server.port=..."
        if error.errno == errno.EADDRINUSE:
            message = (
                f"{where} is in use by another process; choose another port with server.port=..., let the system "
                "choose with server.port=0, or run without HTTP: server.enabled=false"
            )
        raise ListenError(message) from error
    return bound


def _bind_unix(settings: ServerSettings, uds: str, resources: ExitStack) -> socket.socket:
    """Bind a socket file of the mode `uds_mode`, which `resources` remove with its lock."""
    path, mode = socket_path(uds), int(str(settings.uds_mode), 8)
    _check_mode(settings, mode, f"server.uds_mode={settings.uds_mode}", "server.uds_mode=600")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if uds == AUTO:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(path.parent, f"{path.name}.lock")
        resources.callback(lock.release)
        if path.is_socket() and not _is_listening(str(path)):
            path.unlink()  # a killed process left it
        bound.bind(str(path))
        resources.callback(path.unlink, missing_ok=True)
        path.chmod(mode)
        bound.listen(BACKLOG)
    except FolderInUse as error:
        bound.close()
        raise ListenError(f"server.uds={path}: {error}; end that, or choose another path") from error
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"server.uds={path} is in use by another process or is a file; choose another") from error
        raise ListenError(f"cannot listen on server.uds={path}: {error}; choose another path") from error
    return bound


def _adopted(settings: ServerSettings, inherited: socket.socket) -> BoundSocket:
    """Raises ConfigError for a socket without keys that others reach."""
    one = _named(inherited, settings)
    if one.path is None:
        _check_exposure(settings, str(inherited.getsockname()[0]), f"the inherited socket {one.url}")
    else:
        with suppress(OSError):  # a path that is gone already: nobody connects by it
            _check_mode(settings, one.path.stat().st_mode, f"the inherited socket {one.path}", "SocketMode=0600")
    return one


def _named(one: socket.socket, settings: ServerSettings) -> BoundSocket:
    name = one.getsockname()
    if one.family == socket.AF_UNIX:
        return BoundSocket(one, f"{UNIX}{name}")
    scheme = "https" if settings.ssl_certfile else "http"
    host, port = name[:2]
    return BoundSocket(one, f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")


def _is_listening(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(name) == 0


def _check_exposure(settings: ServerSettings, address: str, what: str) -> None:
    """Raise ConfigError for a server without keys that other machines reach: they could also train it."""
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not is_local:
        _check_keys(settings, f"{what} can be reached from other machines", "stay on this machine with 127.0.0.1")


def _check_mode(settings: ServerSettings, mode: int, what: str, way_out: str) -> None:
    """Raise ConfigError for a unix socket without keys that others than its owner may connect to."""
    if mode & 0o066:
        _check_keys(settings, f"{what} lets other users connect", f"keep it to its owner with {way_out}")


def _check_keys(settings: ServerSettings, fact: str, way_out: str) -> None:
    if settings.control_routes and not settings.api_keys:
        raise ConfigError(
            f"{fact} and there are no keys; name one with "
            "'server.api_keys=[{name: operator, role: admin, env: PARALLM_API_KEY}]', switch the routes that control "
            f"training off with server.control_routes=false, or {way_out}"
        )


def _check_certificates(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile or settings.ssl_ca_certs:
            raise ListenError("server.ssl_keyfile and server.ssl_ca_certs need server.ssl_certfile")
        return
    if settings.port is None:
        raise ConfigError("server.ssl_certfile is for server.port, which is null; HTTP over a unix socket has no TLS")
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.ssl_ca_certs)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ListenError(
            f"server.ssl_certfile={settings.ssl_certfile} with its key cannot be used: {error}; give PEM "
            "files, the key without a password"
        ) from error
