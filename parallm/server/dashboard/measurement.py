"""The numbers of a pulse: load, memory and time of this process now."""

from collections.abc import Mapping
from typing import Any

from parallm.server.interfaces import Device
from parallm.server.service import Service


def measure(service: Service) -> Mapping[str, Any]:
    """Return what changes between steps. Counts go on since the start; the page shows their differences."""
    load = service.engine.stats()
    return {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "held": service.gateway.num_held,
        "max_rows": load.max_rows,
        "kv_bytes": load.kv_bytes,
        "kv_limit": load.kv_bytes_limit,
        "prefix_bytes": load.prefix_bytes,
        "preemptions": load.num_preemptions,
        "tokens": dict(load.tokens_total),
        "prompt_tokens": load.prompt_tokens_total,
        "cached_prompt_tokens": load.cached_prompt_tokens_total,
        "by_version": {f"{card.name}@{card.version}": card.num_running for card in service.catalog()},
        "trajectories": _trajectories(service),
        **({} if service.device is None else _device(service.device)),
    }


def _device(device: Device) -> dict[str, Any]:
    """Return seconds by kind of work since the start, bytes of arrays, and shares of use."""
    return {"device": dict(device.seconds()), "memory": dict(device.memory()), "usage": dict(device.usage())}


def _trajectories(service: Service) -> dict[str, int]:
    """Return the counts of each policy that learns from clients, as `policy/waiting`."""
    counts: dict[str, int] = {}
    for policy, source in service.trajectories.items():
        report = source.report()
        counts |= {f"{policy}/waiting": report.num_waiting, f"{policy}/rewarded": report.num_rewarded}
        counts |= {f"{policy}/trained": report.num_trained, f"{policy}/dropped": sum(report.dropped.values())}
    return counts
