"""The listening socket, TCP or unix. It is made before anything slow, so that a wrong address stops a run at once."""

import errno
import ipaddress
import resource
import socket
import ssl
from pathlib import Path

from parallm.errors import ParallmError
from parallm.server.settings import ServerSettings

BACKLOG = 2048
DEFAULT_CONNECTIONS = 1000
FILES_FOR_OTHERS = 256
"""Open files for checkpoints, metrics, adapters, models and logs."""


class ListenError(ParallmError):
    """The server cannot listen: a wrong or taken address, a wrong certificate, or too few open files."""


def bind(settings: ServerSettings) -> socket.socket:
    """Return a listening socket on `uds` or on `host:port`; port 0 takes a free one. Raises ListenError.

    Clients that connect before the server starts wait.
    """
    _check_certificates(settings)
    connection_limit(settings)
    _check_one_address(settings)
    bound = _bind_unix(settings.uds) if settings.uds else _bind_tcp(settings)
    bound.setblocking(False)
    return bound


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


def _check_one_address(settings: ServerSettings) -> None:
    """Raise ListenError for a host or a port beside a unix socket: nothing would listen there."""
    usual = ServerSettings()
    for name, given, default in (("host", settings.host, usual.host), ("port", settings.port, usual.port)):
        if settings.uds and given != default:
            raise ListenError(
                f"server.uds={settings.uds} listens on no address, and server.{name}={given} names one; leave "
                f"server.uds out, or set server.{name}={default}, which is not used then"
            )


def _bind_tcp(settings: ServerSettings) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"server.host={settings.host} is not an address of this machine: {error}") from error
    # `localhost` is often both; clients try 127.0.0.1
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    _check_exposure(settings, str(address[0]))
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # with SO_REUSEADDR two programs can bind, but only one can listen
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        message = f"cannot listen on {where}: {error}; change server.host=... or server.port=..."
        if error.errno == errno.EADDRINUSE:
            message = (
                f"{where} is in use by another process; choose another port with server.port=..., let the system "
                "choose with server.port=0, or run without HTTP: server.enabled=false"
            )
        raise ListenError(message) from error
    return bound


def _bind_unix(name: str) -> socket.socket:
    """Bind a socket file that only its owner may connect to."""
    path = Path(name)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_listening(name):
            path.unlink()  # a killed process left it
        bound.bind(name)
        path.chmod(0o600)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"server.uds={name} is in use by another process or is a file; choose another") from error
        raise ListenError(f"cannot listen on server.uds={name}: {error}; choose another path") from error
    return bound


def _is_listening(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(name) == 0


def _check_exposure(settings: ServerSettings, address: str) -> None:
    """Raise ListenError for a server without keys that other machines reach: they could also train it."""
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not is_local and settings.control_routes and not settings.api_keys:
        raise ListenError(
            f"server.host={settings.host} can be reached from other machines and there are no keys; name one with "
            "'server.api_keys=[{name: operator, role: admin, env: PARALLM_API_KEY}]', switch the routes that control "
            "training off with server.control_routes=false, or stay on this machine with server.host=127.0.0.1"
        )


def _check_certificates(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile or settings.ssl_ca_certs:
            raise ListenError("server.ssl_keyfile and server.ssl_ca_certs need server.ssl_certfile")
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.ssl_ca_certs)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ListenError(
            f"server.ssl_certfile={settings.ssl_certfile} with its key cannot be used: {error}; give PEM "
            "files, the key without a password"
        ) from error
