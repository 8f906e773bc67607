"""The configuration of one of several workers: what it shares with the others, and what is its own."""

import dataclasses
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parallm.config.run_folder import SERVING
from parallm.config.run_kinds import flat_keys
from parallm.config.schema import RunConfig, ServeConfig
from parallm.distributed.identity import FRONT, listen_address
from parallm.server.operation.sockets import socket_path
from parallm.server.settings import AUTO, OFF, ServerSettings

PACKAGES = ("mlx", "mlx-lm", "numpy")
OWN_KEYS = ("metrics.", "server.", "log_", "device.", "model.path", "model.adapter", "rollout.reward_model.adapter")
"""Prefixes of keys that may differ between workers: addresses, and folders of their machines."""
SHARED_KEYS = ("metrics.rollouts",)
"""Keys among these that must not differ: workers encode the completions of a step together."""


def shared_facts(config: RunConfig | ServeConfig) -> dict[str, Any]:
    """What all workers must have in common before they load anything."""
    keys = flat_keys(dataclasses.asdict(config))
    shared = {
        name: value
        for name, value in keys.items()
        if name in SHARED_KEYS or (not name.startswith(OWN_KEYS) and not name.endswith(".path"))
    }
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in shared.items()}
    return {**plain, "Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def own_config(config: RunConfig, rank: int) -> RunConfig:
    """The configuration of worker `rank`: rank 0 alone shows and records; each serves at an address of its own.

    That is the one that its starter has chosen for a front, else server.port + r, and server.uds with `.r` behind it.
    """
    server = own_server(config.server, rank)
    if rank == 0:
        return dataclasses.replace(config, server=server)
    metrics = dataclasses.replace(config.metrics, display="off", wandb="off", trackio=False, tensorboard=False)
    return dataclasses.replace(config, server=server, metrics=metrics)


def own_server(server: ServerSettings, rank: int) -> ServerSettings:
    """The settings of the server of worker `rank`. Raises ConfigError."""
    changes: dict[str, Any] = {}
    address = listen_address()
    if address is not None:
        changes = {"host": address.host, "port": address.port, "uds": None}
        changes |= dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"))
    elif rank and server.enabled:
        changes = {
            "uds": None if server.uds is None else f"{socket_path(server.uds)}.{rank}",
            "port": server.port + rank if server.port else server.port,
        }
    if rank and server.state not in (OFF, AUTO):
        changes["state"] = f"{server.state}.{rank}"
    return dataclasses.replace(server, **changes)


def shown_url(url: str | None) -> str | None:
    """Return the address that people call: the front's, if one stands before this process, else its own."""
    return os.environ.get(FRONT, url) if url else None


def copy_operators_state(server: ServerSettings, leader: Path, own: Path, rank: int) -> None:
    """Begin with the leader's state of operators, so that a worker that is new or was away serves what all serve.

    `leader` and `own` are the folders that hold it with server.state=auto. Without a common disk nothing is copied.
    """
    if server.state == OFF or rank == 0:
        return
    found = list(leader.glob(f"{SERVING}*/"))
    if server.state != AUTO:
        path = Path(server.state).expanduser()
        found, own = [path] if path.is_dir() else [], path.parent
    for path in found:
        copy = own / (path.name if server.state == AUTO else f"{path.name}.{rank}")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.lock"))
