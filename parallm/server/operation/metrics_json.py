"""The registry of `/metrics` as JSON: a few numbers by the names that dashboards ask for, and every sample."""

from typing import Any

from prometheus_client import CollectorRegistry

from parallm.server.catalog import served_version
from parallm.server.service import Service


def metrics_values(service: Service, registry: CollectorRegistry, num_held: int) -> dict[str, Any]:
    """`num_held`: requests that wait for the end of a pause."""
    load = service.engine.stats()
    return {
        "current_policy_version": served_version(service),
        "queue_depth": load.num_waiting + num_held,
        "max_batch_size": load.max_rows,
        # requests join those that run at the next step: nothing waits for a batch to fill
        "flush_interval_ms": 0.0,
        "num_running": load.num_running,
        "metrics": _samples(registry),
    }


def wants_json(accept: str) -> bool:
    """Whether an `Accept` header names JSON. Prometheus names its own formats, and browsers name none of them."""
    return any(kind.partition(";")[0].strip() == "application/json" for kind in accept.lower().split(","))


def _samples(registry: CollectorRegistry) -> dict[str, list[dict[str, Any]]]:
    """By name, each with its labels."""
    found: dict[str, list[dict[str, Any]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append({"labels": sample.labels, "value": sample.value})
    return found
