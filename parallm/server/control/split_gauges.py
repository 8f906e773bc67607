"""Splits and what their versions have answered, as `/metrics` shows them when it is asked."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parallm.server.control.splits import Splits
from parallm.server.control.version_statistics import Statistics


class SplitGauges(Collector):
    """Registered with the meters. Of names that are split only, which are the operator's and few."""

    def __init__(self, splits: Splits, statistics: Statistics) -> None:
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
            for model, wanted in split.shares.items():
                share.add_metric([split.name, model], wanted)
            for version, one in self._statistics.of(split.name).items():
                requests.add_metric([split.name, version], one.num_requests)
                rewards.add_metric([split.name, version], one.num_rewards)
                total.add_metric([split.name, version], one.reward_sum)
        yield from (share, requests, rewards, total)
