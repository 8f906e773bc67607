"""The configuration of one of several workers: what it shares with the others, and what is its own."""

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from parallm.config.run_kinds import flat_keys
from parallm.config.schema import RunConfig, ServeConfig

PACKAGES = ("mlx", "mlx-lm", "numpy")
OWN_KEYS = ("metrics.", "server.", "log_", "device.", "model.path", "model.adapter", "rollout.reward_model.adapter")
"""Prefixes of keys that may differ between workers: addresses, and folders of their machines."""


def shared_facts(config: RunConfig | ServeConfig) -> dict[str, Any]:
    """What all workers must have in common before they load anything."""
    keys = flat_keys(dataclasses.asdict(config))
    own = {name: value for name, value in keys.items() if not name.startswith(OWN_KEYS) and not name.endswith(".path")}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    return {**plain, "Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def own_config(config: RunConfig, rank: int) -> RunConfig:
    """The configuration of worker `rank`: rank 0 alone shows and records; each serves at an address of its own.

    Rank r listens on server.port + r, or on the socket server.uds with `.r` behind it.
    """
    if rank == 0:
        return config
    server, metrics = config.server, config.metrics
    address: Mapping[str, Any] = {"port": server.port + rank if server.port else 0}
    if server.uds is not None:
        address = {"uds": f"{server.uds}.{rank}"}
    return dataclasses.replace(
        config,
        server=dataclasses.replace(server, state="off", **address),
        metrics=dataclasses.replace(metrics, display="off", wandb="off"),
    )
