"""Gauges and counters that `/metrics` reads when it is asked, at no cost in between.

`create_app` registers the collector beside `RequestMetrics`. Label values are names of adapters, policies, splits and
metrics, which operators choose: none comes from a client.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from numbers import Real
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parallm.server.interfaces import Device
from parallm.server.service import Service
from parallm.types import POLICY, AdapterCard


class ServiceCollector(Collector):
    """The engine, adapters, training, live trajectories, splits and the device."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # the registry would collect once at the start to learn the names

    def collect(self) -> Iterator[Metric]:
        if self._service.engine.is_alive:
            yield from self._engine()
        yield from self._adapters()
        yield from self._training()
        if self._service.trajectories:
            yield from self._trajectories()
        if self._service.device is not None:
            yield from _device(self._service.device)
        yield from self._splits()

    def _engine(self) -> Iterator[Metric]:
        load = self._service.engine.stats()
        labels, values = ("model_name", "engine"), (self._service.base_name, "0")
        used = load.kv_bytes / load.kv_bytes_limit
        gauges = {
            "num_requests_running": ("Completions that decode now.", load.num_running),
            "num_requests_waiting": ("Requests that wait for rows.", load.num_waiting),
            "kv_cache_usage_perc": ("Share of engine.kv_cache_bytes in use, 0 to 1.", used),
        }
        counts = {
            "num_preemptions": ("Rows and prompts that gave up their memory for a while.", load.num_preemptions),
            "prefix_cache_queries": ("Tokens of prompts that were begun.", load.prompt_tokens_total),
            "prefix_cache_hits": ("Of these, tokens that were known before.", load.cached_prompt_tokens_total),
            "spec_decode_num_drafts": ("Times that a completion was given proposed tokens.", load.num_drafts),
            "spec_decode_num_draft_tokens": ("Proposed tokens that were checked.", load.draft_tokens_total),
            "spec_decode_num_accepted_tokens": ("Of these, accepted ones.", load.accepted_draft_tokens_total),
        }
        for family, table in ((_gauge, gauges), (_counter, counts)):
            for name, (text, number) in table.items():
                yield family(f"vllm:{name}", text, labels, {values: number})
        tokens = {(str(name),): count for name, count in load.tokens_total.items()}
        yield _counter("parallm:tokens", "Tokens sampled by kind of traffic, rollouts too.", ("traffic",), tokens)

    def _adapters(self) -> Iterator[Metric]:
        cards = sorted(self._service.catalog(), key=lambda card: card.name)
        versions = {name: list(group) for name, group in groupby(cards, key=lambda card: card.name)}

        def gauge(name: str, text: str, measure: Callable[[list[AdapterCard]], float]) -> Metric:
            values = {(adapter,): measure(own) for adapter, own in versions.items()}
            return _gauge(f"parallm:adapter_{name}", text, ("adapter",), values)

        yield gauge(
            "served_version",
            "What the bare name means.",
            lambda own: max((card.version for card in own if card.is_served), default=0),
        )
        yield gauge("newest_version", "Newest in memory.", lambda own: max(card.version for card in own))
        yield gauge("versions", "Versions in memory.", len)
        yield gauge("running", "Completions that use it now.", lambda own: sum(card.num_running for card in own))
        yield gauge("bytes", "Bytes of the versions in memory.", lambda own: sum(card.num_bytes for card in own))
        swaps = {(name,): number for name, number in self._service.swaps().items()}
        yield _counter("parallm:adapter_swaps", "Changes of what the bare name means.", ("adapter",), swaps)

    def _training(self) -> Iterator[Metric]:
        status = self._service.status()
        statuses = status.policies or {POLICY: status}
        states = {(policy, own.state): 1 for policy, own in statuses.items()}
        yield _gauge("parallm:training_state", "1 for the present state.", ("policy", "state"), states)
        steps = {(policy,): own.step for policy, own in statuses.items()}
        yield _counter("parallm:training_steps", "Steps finished.", ("policy",), steps)
        metrics = {
            (policy, name): float(value)
            for policy, own in statuses.items()
            for name, value in own.metrics.items()
            if isinstance(value, Real)
        }
        text = "Of the last step: loss, reward, parity and more."
        yield _gauge("parallm:training_metric", text, ("policy", "metric"), metrics)
        saves = {(policy,): own.checkpoint_saves for policy, own in statuses.items()}
        yield _counter("checkpoint_saves", "Checkpoints written.", ("policy",), saves)

    def _trajectories(self) -> Iterator[Metric]:
        reports = {policy: own.report() for policy, own in self._service.trajectories.items()}
        buffered = {
            (policy, state): getattr(report, f"num_{state}")
            for policy, report in reports.items()
            for state in ("waiting", "rewarded", "reserved")
        }
        yield _gauge("parallm:trajectories", "In the buffer.", ("policy", "state"), buffered)
        collected = {(policy,): report.num_collected for policy, report in reports.items()}
        yield _counter("parallm:trajectories_collected", "Asked for by clients.", ("policy",), collected)
        trained = {(policy,): report.num_trained for policy, report in reports.items()}
        yield _counter("parallm:trajectories_trained", "Trained on.", ("policy",), trained)
        dropped = {
            (policy, reason): count for policy, report in reports.items() for reason, count in report.dropped.items()
        }
        yield _counter("parallm:trajectories_dropped", "By reason.", ("policy", "reason"), dropped)

    def _splits(self) -> Iterator[Metric]:
        """Yield only names that are split, which are few."""
        splits, labels = self._service.splits.all(), ("name", "model")
        shares = {(name, model): share for name, own in splits.items() for model, share in own.items()}
        yield _gauge("parallm:split_share", "Share of the requests that it is to get.", labels, shares)
        counts = {
            (name, version): counts for name in splits for version, counts in self._service.statistics.of(name).items()
        }
        requests = {values: own.num_requests for values, own in counts.items()}
        yield _counter("parallm:split_requests", "Requests that it has answered.", labels, requests)
        rewards = {values: own.num_rewards for values, own in counts.items()}
        yield _counter("parallm:split_rewards", "Rewards for what it has answered.", labels, rewards)
        total = {values: own.reward_sum for values, own in counts.items()}
        yield _gauge("parallm:split_reward_sum", "Their sum.", labels, total)


def _device(device: Device) -> Iterator[Metric]:
    def by(values: Mapping[str, float]) -> dict[tuple[str], float]:
        return {(name,): value for name, value in values.items()}

    yield _counter("parallm:device_seconds", "Seconds of the device by kind of work.", ("work",), by(device.seconds()))
    text = "Bytes of arrays: now, at most, kept after use."
    yield _gauge("parallm:device_memory_bytes", text, ("kind",), by(device.memory()))
    text = "Shares of its seconds and serving's latency target, as the settings of these names."
    yield _gauge("parallm:device_share", text, ("share",), by(device.shares()))
    usage = dict(device.usage())
    if "accelerator" in usage:
        busy = usage.pop("accelerator")
        text = "Utilization in the last second, by the driver."
        yield _gauge("parallm:accelerator_usage_ratio", text, (), {(): busy})
    text = "Share of all cores that was busy in the last second."
    yield _gauge("parallm:cpu_usage_ratio", text, ("of",), by(usage))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Mapping[Any, float],
) -> Metric:
    """Return a family; `samples` are numbers by tuples of the labels' values."""
    family = kind(name, text, labels=labels)
    for values, number in samples.items():
        family.add_metric(values, number)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)
