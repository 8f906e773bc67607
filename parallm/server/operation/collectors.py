"""Gauges and counters that `/metrics` reads when it is asked, at no cost in between.

`create_app` registers both collectors beside `RequestMetrics`. Label values are names of adapters, policies, splits and
metrics, which operators choose: none comes from a client.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from numbers import Real

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parallm.reports import TrainingStatus
from parallm.server.control.traffic_splits import TrafficSplits, VersionStatistics
from parallm.server.interfaces import Device
from parallm.server.service import Service
from parallm.types import POLICY


class ServiceCollector(Collector):
    """The engine, adapters, training, live trajectories and the device."""

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

    def _engine(self) -> Iterator[Metric]:
        load = self._service.engine.stats()
        labels = {"model_name": self._service.base_name, "engine": "0"}
        yield _gauge("vllm:num_requests_running", "Completions that decode now.", labels, load.num_running)
        yield _gauge("vllm:num_requests_waiting", "Requests that wait for rows.", labels, load.num_waiting)
        used = load.kv_bytes / load.kv_bytes_limit
        yield _gauge("vllm:kv_cache_usage_perc", "Share of engine.kv_cache_bytes in use, 0 to 1.", labels, used)
        counts = {
            "num_preemptions": ("Rows and prompts that gave up their memory for a while.", load.num_preemptions),
            "prefix_cache_queries": ("Tokens of prompts that were begun.", load.prompt_tokens_total),
            "prefix_cache_hits": ("Of these, tokens that were known before.", load.cached_prompt_tokens_total),
            "spec_decode_num_drafts": ("Times that a completion was given proposed tokens.", load.num_drafts),
            "spec_decode_num_draft_tokens": ("Proposed tokens that were checked.", load.draft_tokens_total),
            "spec_decode_num_accepted_tokens": ("Of these, accepted ones.", load.accepted_draft_tokens_total),
        }
        for name, (text, count) in counts.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), count)
            yield family
        tokens = {str(name): float(count) for name, count in load.tokens_total.items()}
        yield _counter("parallm:tokens", "Tokens sampled by kind of traffic, rollouts too.", "traffic", tokens)

    def _adapters(self) -> Iterator[Metric]:
        served = GaugeMetricFamily("parallm:adapter_served_version", "What the bare name means.", labels=["adapter"])
        newest = GaugeMetricFamily("parallm:adapter_newest_version", "Newest in memory.", labels=["adapter"])
        count = GaugeMetricFamily("parallm:adapter_versions", "Versions in memory.", labels=["adapter"])
        running = GaugeMetricFamily("parallm:adapter_running", "Completions that use it now.", labels=["adapter"])
        size = GaugeMetricFamily("parallm:adapter_bytes", "Bytes of the versions in memory.", labels=["adapter"])
        cards = sorted(self._service.catalog(), key=lambda card: card.name)
        for name, group in groupby(cards, key=lambda card: card.name):
            versions = list(group)
            served.add_metric([name], max((card.version for card in versions if card.is_served), default=0))
            newest.add_metric([name], max(card.version for card in versions))
            count.add_metric([name], len(versions))
            running.add_metric([name], sum(card.num_running for card in versions))
            size.add_metric([name], sum(card.num_bytes for card in versions))
        yield from (served, newest, count, running, size)
        swaps = {name: float(number) for name, number in self._service.swaps().items()}
        yield _counter("parallm:adapter_swaps", "Changes of what the bare name means.", "adapter", swaps)

    def _training(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("parallm:training_state", "1 for the present state.", labels=["policy", "state"])
        step = CounterMetricFamily("parallm:training_steps", "Steps finished.", labels=["policy"])
        saves = CounterMetricFamily("checkpoint_saves", "Checkpoints written.", labels=["policy"])
        metrics = GaugeMetricFamily(
            "parallm:training_metric", "Of the last step: loss, reward, parity and more.", labels=["policy", "metric"]
        )
        for policy, status in _by_policy(self._service.status()).items():
            state.add_metric([policy, status.state], 1)
            step.add_metric([policy], status.step)
            for name, value in status.metrics.items():
                if isinstance(value, Real):
                    metrics.add_metric([policy, name], float(value))
            saves.add_metric([policy], status.checkpoint_saves)
        yield from (state, step, metrics, saves)

    def _trajectories(self) -> Iterator[Metric]:
        buffered = GaugeMetricFamily("parallm:trajectories", "In the buffer.", labels=["policy", "state"])
        collected = CounterMetricFamily("parallm:trajectories_collected", "Asked for by clients.", labels=["policy"])
        trained = CounterMetricFamily("parallm:trajectories_trained", "Trained on.", labels=["policy"])
        dropped = CounterMetricFamily("parallm:trajectories_dropped", "By reason.", labels=["policy", "reason"])
        for policy, trajectories in self._service.trajectories.items():
            report = trajectories.report()
            buffered.add_metric([policy, "waiting"], report.num_waiting)
            buffered.add_metric([policy, "rewarded"], report.num_rewarded)
            buffered.add_metric([policy, "reserved"], report.num_reserved)
            collected.add_metric([policy], report.num_collected)
            trained.add_metric([policy], report.num_trained)
            for reason, count in report.dropped.items():
                dropped.add_metric([policy, reason], count)
        yield from (buffered, collected, trained, dropped)


def _device(device: Device) -> Iterator[Metric]:
    seconds = {work: float(number) for work, number in device.seconds().items()}
    yield _counter("parallm:device_seconds", "Seconds of the device by kind of work.", "work", seconds)
    yield _gauges(
        "parallm:device_memory_bytes", "Bytes of arrays: now, at most, kept after use.", "kind", device.memory()
    )
    yield _gauges(
        "parallm:device_share",
        "Shares of its seconds and serving's latency target, as the settings of these names.",
        "share",
        device.shares(),
    )
    usage = dict(device.usage())
    if "accelerator" in usage:
        busy = usage.pop("accelerator")
        yield _gauge("parallm:accelerator_usage_ratio", "Utilization in the last second, by the driver.", {}, busy)
    yield _gauges("parallm:cpu_usage_ratio", "Share of all cores that was busy in the last second.", "of", usage)


def _by_policy(status: TrainingStatus) -> Mapping[str, TrainingStatus]:
    return status.policies or {POLICY: status}


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class SplitCollector(Collector):
    """Splits, and what their versions have answered: only names that are split, which are few."""

    def __init__(self, splits: TrafficSplits, statistics: VersionStatistics) -> None:
        self._splits = splits
        self._statistics = statistics

    def describe(self) -> list[Metric]:
        return []  # the registry would collect once at the start to learn the names

    def collect(self) -> Iterator[Metric]:
        labels = ["name", "model"]
        share = GaugeMetricFamily("parallm:split_share", "Share of the requests that it is to get.", labels=labels)
        requests = CounterMetricFamily("parallm:split_requests", "Requests that it has answered.", labels=labels)
        rewards = CounterMetricFamily("parallm:split_rewards", "Rewards for what it has answered.", labels=labels)
        total = GaugeMetricFamily("parallm:split_reward_sum", "Their sum.", labels=labels)
        for split in self._splits.all():
            for model, target in split.shares.items():
                share.add_metric([split.name, model], target)
            for version, counts in self._statistics.of(split.name).items():
                requests.add_metric([split.name, version], counts.num_requests)
                rewards.add_metric([split.name, version], counts.num_rewards)
                total.add_metric([split.name, version], counts.reward_sum)
        yield from (share, requests, rewards, total)
