"""The registry of `/metrics` as JSON: every sample, and some numbers under names of their own."""

from typing import Any

from prometheus_client import CollectorRegistry

from parallm.server.catalog import served_version
from parallm.server.service import Service


def metrics_values(service: Service, registry: CollectorRegistry, num_held: int) -> dict[str, Any]:
    """Return the JSON object. `num_held` requests wait for the end of a pause."""
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
    """Return whether an `Accept` header names JSON, which neither Prometheus nor browsers do."""
    return any(kind.partition(";")[0].strip() == "application/json" for kind in accept.lower().split(","))


def _samples(registry: CollectorRegistry) -> dict[str, list[dict[str, Any]]]:
    """Return the samples by name, each with its labels."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            samples.setdefault(sample.name, []).append({"labels": sample.labels, "value": sample.value})
    return samples
