#!/usr/bin/env python3
"""Predicts steps of many workers from the steps of one and of two: `scripts/simulate_steps.py ONE TWO [MORE...]`.

ONE, TWO and MORE are metrics.jsonl of runs with the same rows a worker, with 1, 2 and other numbers of workers. What a
step costs is taken from ONE and TWO; how many workers a run had is told by its tokens. Steps are then simulated, with
lengths and stragglers drawn and failures averaged, for three designs:

- flat, today's: rank 0 gathers the groups of all and hands all of them to all over TCP; every worker plans and reports
  the whole step; one ring sums over all.
- ahead: the same with trainer.max_off_policy_steps=1: a worker that waits samples the next step.
- tree: rows stay with the worker that sampled them, and lengths and rewards alone go to all, by a tree of hosts; the
  sum goes over NVLink within a host first, then over a ring of hosts. Not built: see parallm/distributed/SCALE.md.
"""

import json
import math
import random
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

SIZES = (1, 2, 4, 8, 16, 64, 256, 1000)
STEPS = 400
WARM_UP = 3
HALF_OF_NORMAL = 0.954
"""Median distance of two draws of a normal distribution, in its deviations."""
TOKEN_BYTES = 13
"""Bytes of a token in a gathered group: its number, its log-prob and its mask."""
HEAD_BYTES = 64
"""Bytes of a row without its tokens: length, reward, advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a worker's own rows in a step."""

    sampling: float
    spread: float
    """Deviation of the sampling of one worker from that of others in the same step, as a share."""
    update: float
    """On the device."""
    host: float
    """Planning and reporting, which every worker does for the rows of all."""
    tokens: float
    """Sampled by one worker."""
    row_tokens: float
    """Of each row; with `shortest` the longest."""
    shortest: float | None = None
    """Rows have lengths from this on, as likely on a logarithmic scale."""
    floor: float = 0.7
    """Share of a decode step of all rows that a step of one row takes, too."""

    def sampled(self, source: random.Random) -> float:
        """Seconds of one worker's sampling: steps cost less as rows end, and last until the longest has ended."""
        seconds = self.sampling * (1 + source.gauss(0, self.spread))
        if self.shortest is None:
            return seconds
        rows = round(self.tokens / self.row_tokens)
        low, high = math.log(self.shortest), math.log(self.row_tokens)
        lengths = [math.exp(source.uniform(low, high)) for _ in range(rows)]
        longest, filled = max(lengths), fmean(lengths)
        return seconds * (self.floor * longest + (1 - self.floor) * filled) / self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    devices: int = 8
    """Of a host."""
    nvlink: float = 300e9
    """Bytes per second of a ring within a host."""
    network: float = 25e9
    """The same between hosts."""
    tcp: float = 3e9
    """Of one host's plain connections."""
    latency: float = 20e-6
    """Seconds of a hop."""
    failure_hours: float
    """Mean time of one device between failures; Llama 3 had 419 in 54 days on 16,384."""
    load: float
    """Seconds from a failure to the first step of a new gang."""


def calibrated(
    one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]], row_tokens: float, shortest: float | None = None
) -> Costs:
    """What steps of one worker and the waits of two tell."""
    sampling = middle(one, "seconds/rollout")
    update = middle(one, "update/device_seconds")
    host = max(0.0, middle(two, "seconds/update") - middle(two, "update/device_seconds")) / 2
    return Costs(
        sampling=sampling,
        spread=middle(two, "exchange/wait_seconds") / HALF_OF_NORMAL / sampling,
        update=update,
        host=host,
        tokens=middle(one, "rollout/tokens"),
        row_tokens=row_tokens,
        shortest=shortest,
    )


def simulated(
    workers: int, costs: Costs, cluster: Cluster, *, vector_bytes: float, is_tree: bool = False, is_ahead: bool = False
) -> dict[str, float]:
    """Mean seconds of a step and of its parts, with what failures cost."""
    source = random.Random(workers)
    steps = [[costs.sampled(source) for _ in range(workers)] for _ in range(max(20, STEPS // workers))]
    mean, slowest = fmean(map(fmean, steps)), fmean(slowest_of(steps, is_ahead=is_ahead))
    hosts = math.ceil(workers / cluster.devices)
    parts = {
        "sampling": mean,
        "stragglers": slowest - mean,
        "update": costs.update,
        "host": costs.host * (1 if is_tree else workers),
        "gather": gather_seconds(workers, hosts, costs, cluster, is_tree=is_tree),
        "sum": sum_seconds(workers, hosts, vector_bytes, cluster, is_tree=is_tree),
    }
    step = sum(parts.values())
    lost = (cluster.load + step / 2) * workers / (cluster.failure_hours * 3600)
    return parts | {"failures": step * lost, "step": step * (1 + lost)}


def slowest_of(steps: Sequence[Sequence[float]], *, is_ahead: bool) -> Iterator[float]:
    """How long each step waits for its slowest worker, from the seconds of sampling of each worker in each step."""
    ahead = [0.0] * len(steps[0])  # what each has already sampled of the next step
    for step in steps:
        left = [max(0.0, seconds - done) for seconds, done in zip(step, ahead, strict=True)]
        slowest = max(left)
        if is_ahead:
            ahead = [slowest - seconds for seconds in left]
        yield slowest


def gather_seconds(workers: int, hosts: int, costs: Costs, cluster: Cluster, *, is_tree: bool) -> float:
    """Groups through rank 0's host, or heads of rows by a tree of hosts."""
    if workers == 1:
        return 0.0
    if is_tree:
        heads = costs.tokens / costs.row_tokens * HEAD_BYTES * workers
        return math.ceil(math.log2(hosts) + 1) * (heads / cluster.tcp + cluster.latency)
    everything = costs.tokens * TOKEN_BYTES * workers
    return everything * workers / cluster.tcp + cluster.latency


def sum_seconds(workers: int, hosts: int, size: float, cluster: Cluster, *, is_tree: bool) -> float:
    """A ring moves nearly twice the vector past each of its members, in as many hops."""
    if workers == 1:
        return 0.0
    if hosts == 1:
        return ring(workers, size, cluster.nvlink, cluster.latency)
    if not is_tree:
        return ring(workers, size, cluster.network, cluster.latency)
    inside = ring(cluster.devices, size, cluster.nvlink, cluster.latency)
    return inside + ring(hosts, size, cluster.network, cluster.latency)


def ring(members: int, size: float, speed: float, latency: float) -> float:
    return 2 * (members - 1) * (size / members / speed + latency)


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="METRICS", help="of 1, 2 and more workers")
    parser.add_argument("--vector-mb", type=float, default=35.0, help="bytes of the adapter's gradient (%(default)s)")
    parser.add_argument("--row-tokens", type=float, default=256.0, help="tokens of a row (%(default)s)")
    parser.add_argument("--shortest", type=float, help="shortest row, where rows are ragged")
    parser.add_argument("--load-seconds", type=float, default=30.0, help="of a new gang (%(default)s)")
    parser.add_argument("--failure-hours", type=float, default=50_000.0, help="of a device (%(default)s)")
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.runs]
    if len(runs) < 2:
        parser.error("two runs at least: one of 1 worker and one of 2")
    costs = calibrated(runs[0], runs[1], arguments.row_tokens, arguments.shortest)
    cluster = Cluster(load=arguments.load_seconds, failure_hours=arguments.failure_hours)
    predict = partial(simulated, costs=costs, cluster=cluster, vector_bytes=arguments.vector_mb * 1e6)
    alone = predict(1)["step"]
    for design, options in {"flat, today's": {}, "ahead": {"is_ahead": True}, "tree": {"is_tree": True}}.items():
        print(f"{design}: milliseconds")
        for workers in SIZES:
            step = predict(workers, **options)
            parts = ", ".join(f"{name} {1000 * step[name]:,.0f}" for name in step)
            print(f"  {workers:5} workers: efficiency {alone / step['step']:.3f}; {parts}")
    print("measured")
    one = middle(runs[0], "seconds/total")
    for path, rows in zip(arguments.runs, runs, strict=True):
        workers = round(middle(rows, "rollout/tokens") / costs.tokens)
        predicted, found = predict(workers)["step"], middle(rows, "seconds/total")
        efficiencies = f"efficiency {one / found:.3f}, predicted {alone / predicted:.3f}"
        print(f"  {workers} workers: step {found:.3f} s, predicted {predicted:.3f}; {efficiencies}   {path}")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a run after its first steps, in which it compiles."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows[WARM_UP:] or rows


def middle(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return median(row[name] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
