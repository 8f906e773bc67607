"""The port of a run-api that a run starts: loopback only, since it has no keys and anybody may empty it."""

import dataclasses
import socket
from urllib.parse import urlsplit

from parallm.errors import ConfigError
from parallm.rollout.atropos_settings import AtroposSettings

LOOPBACK = "127.0.0.1"


def with_free_port(settings: AtroposSettings) -> AtroposSettings:
    """With a free port in place of port 0. Raises ConfigError for a URL where this run cannot start a run-api."""
    parts = urlsplit(settings.url)
    if not settings.start.api:
        return settings
    if parts.scheme != "http" or parts.hostname not in (LOOPBACK, "localhost") or parts.port is None or parts.path:
        raise ConfigError(
            f"rollout.atropos.url={settings.url}: with rollout.atropos.start.api it is started on this machine, which "
            f"nobody else may reach; name http://{LOOPBACK}:PORT, of which port 0 is any free one"
        )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        try:
            listener.bind((LOOPBACK, parts.port))
        except OSError as error:
            raise ConfigError(
                f"rollout.atropos.url={settings.url}: the port is taken ({error.strerror}); join what runs there with "
                "rollout.atropos.start.api=false, or name another port"
            ) from error
        port = int(listener.getsockname()[1])
    return dataclasses.replace(settings, url=f"http://{LOOPBACK}:{port}")
