"""A process's place among the workers, from the environment variables of mx.distributed. Imports no MLX.

A launcher sets them (mlx.launch, `launcher.py`, a cluster's own script); no worker knows which.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallm.errors import ConfigError

Backend = Literal["ring", "nccl", "jaccl"]
COORDINATOR = "PARALLM_COORDINATOR"
"""Environment variable: HOST:PORT where rank 0 listens for the others; replaces the derived one."""
LISTEN = "PARALLM_LISTEN"
"""Environment variable: HOST:PORT where this process answers HTTP for the front before it, which has `server.port`."""
FRONT = "PARALLM_FRONT"
"""Environment variable: the front's own address, for people to see."""
REPLICA = "PARALLM_REPLICA"
"""Environment variable: the number of this process among several servers of one model."""
PORT_OFFSET = 1000
"""Distance of the coordinator's port from the port that mx.distributed uses on rank 0."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One worker. Example: `Identity(rank=1, size=2, backend="ring", coordinator=Address("127.0.0.1", 33323))`."""

    rank: int
    size: int
    backend: Backend
    coordinator: Address
    """The address at which rank 0 listens for the others."""


def identity_of(environment: Mapping[str, str] = os.environ) -> Identity | None:
    """Return the identity that a launcher has set; None if none has. Raises ConfigError for half a one."""
    if "MLX_RANK" not in environment:
        return None
    rank = _number(environment, "MLX_RANK")
    if path := environment.get("MLX_HOSTFILE"):
        hosts = _json(path, "MLX_HOSTFILE")
        try:
            size, address = len(hosts), _address(hosts[0][0])
        except (TypeError, IndexError, KeyError) as error:
            raise ConfigError(f"MLX_HOSTFILE={path} is no list of lists of IP:PORT") from error
        backend: Backend = "ring"
    elif "NCCL_HOST_IP" in environment:
        address = Address(environment["NCCL_HOST_IP"], _number(environment, "NCCL_PORT"))
        size, backend = _number(environment, "MLX_WORLD_SIZE"), "nccl"
    elif path := environment.get("MLX_IBV_DEVICES", environment.get("JACCL_IBV_DEVICES")):
        size, backend = len(_json(path, "MLX_IBV_DEVICES")), "jaccl"
        address = _address(environment.get("MLX_JACCL_COORDINATOR", environment.get("JACCL_COORDINATOR", "")))
    else:
        raise ConfigError(
            "MLX_RANK is set, and neither MLX_HOSTFILE (ring) nor NCCL_HOST_IP (nccl) nor MLX_IBV_DEVICES (jaccl) is"
        )
    if not 0 <= rank < size:
        raise ConfigError(f"MLX_RANK={rank} is no rank of {size} workers")
    coordinator = environment.get(COORDINATOR)
    return Identity(
        rank=rank,
        size=size,
        backend=backend,
        coordinator=_address(coordinator) if coordinator else Address(address.host, _shifted(address.port)),
    )


def listen_address(environment: Mapping[str, str] = os.environ) -> Address | None:
    """Return where this process is to answer the front; None if none stands before it. Raises ConfigError."""
    return _address(environment[LISTEN]) if LISTEN in environment else None


def replica_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process among several servers of one model. Raises ConfigError."""
    return _number(environment, REPLICA) if REPLICA in environment else 0


def _shifted(port: int) -> int:
    return port + PORT_OFFSET if port + PORT_OFFSET < 2**16 else port - PORT_OFFSET


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name}={environment.get(name, '')} is no number; a launcher sets it") from error


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{text!r} is no HOST:PORT; a launcher sets it")
    return Address(host.strip("[]"), int(port))


def _json(path: str, name: str) -> list[list[str]]:
    try:
        value: list[list[str]] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={path} cannot be read: {error}") from error
    return value
