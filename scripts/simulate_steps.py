#!/usr/bin/env python3
"""Predicts steps of many workers from the steps of one: `scripts/simulate_steps.py ONE [MORE...]`.

ONE and MORE are metrics.jsonl of runs with the same rows a worker, of 1 and of other numbers of workers. What a step
costs is taken from ONE alone: MORE are what predictions are compared with, and their tokens tell how many workers they
had. Steps are then simulated, with lengths drawn, the sampling of each worker drawn from the steps of ONE, and failures
averaged, for three designs:

- flat, today's: all get the groups of all by NCCL; every worker plans the whole step; one ring sums over all.
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
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

SIZES = (1, 2, 4, 8, 16, 64, 256, 1000)
STEPS = 400
WARM_UP = 3
TOKEN_BYTES = 13
"""Bytes of a token in a gathered group: its number, its log-prob and its mask."""
HEAD_BYTES = 64
"""Bytes of a row without its tokens: length, reward, advantage."""
VECTOR_BYTES = 35e6
"""Of an adapter's gradient: rank 16 of a 0.5B shape."""
ROW_SECONDS = 55e-6
"""What a row of another worker costs each: a 128th of what `workers.leader_8` loses by each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a worker's own rows in a step."""

    samplings: Sequence[float]
    """Of several steps, of which any is as likely."""
    update: float
    """On the device."""
    host: float
    """Of an update, beside its passes."""
    others: float
    """What the rows of another worker cost this one, which plans them, too."""
    rest: float
    """Between and beside these parts."""
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
        seconds = source.choice(self.samplings)
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
    failure_hours: float = 50_000.0
    """Mean time of one device between failures; Llama 3 had 419 in 54 days on 16,384."""
    load: float = 30.0
    """Seconds from a failure to the first step of a new gang."""


def calibrated(one: Sequence[Mapping[str, Any]], row_tokens: float, shortest: float | None = None) -> Costs:
    """What steps of one worker tell."""
    update, device = mean(one, "seconds/update"), mean(one, "update/device_seconds")
    return Costs(
        samplings=[row["seconds/rollout"] for row in one],
        update=device,
        host=max(0.0, update - device),
        others=ROW_SECONDS * mean(one, "rollout/tokens") / row_tokens,
        rest=max(0.0, whole_step(one) - mean(one, "seconds/rollout") - update),
        tokens=mean(one, "rollout/tokens"),
        row_tokens=row_tokens,
        shortest=shortest,
    )


def simulated(
    workers: int, costs: Costs, cluster: Cluster, *, vector_bytes: float, is_tree: bool = False, is_ahead: bool = False
) -> dict[str, float]:
    """Mean seconds of a step and of its parts, with what failures cost."""
    source = random.Random(workers)
    steps = [[costs.sampled(source) for _ in range(workers)] for _ in range(max(20, STEPS // workers))]
    usual, slowest = fmean(map(fmean, steps)), fmean(slowest_of(steps, is_ahead=is_ahead))
    hosts = math.ceil(workers / cluster.devices)
    parts = {
        "sampling": usual,
        "stragglers": slowest - usual,
        "update": costs.update,
        "host": costs.host + (0.0 if is_tree else costs.others * (workers - 1)),
        "rest": costs.rest,
        "gather": gather_seconds(workers, hosts, costs, cluster, is_tree=is_tree),
        "sum": sum_seconds(workers, hosts, vector_bytes, cluster, is_tree=is_tree),
    }
    step = sum(parts.values())
    lost = (cluster.load + step / 2) * workers / (cluster.failure_hours * 3600)
    return parts | {"failures": step * lost, "step": step * (1 + lost)}


def predicted_efficiency(one: Sequence[Mapping[str, Any]], workers: int, *, row_tokens: float) -> float:
    """What today's design is to reach with as many workers on one host, by the steps of one worker."""
    costs = calibrated(one, row_tokens)
    predict = partial(simulated, costs=costs, cluster=Cluster(), vector_bytes=VECTOR_BYTES)
    return predict(1)["step"] / predict(workers)["step"]


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
    """Groups past each member of a ring, or heads of rows by a tree of hosts."""
    if workers == 1:
        return 0.0
    if is_tree:
        heads = costs.tokens / costs.row_tokens * HEAD_BYTES * workers
        return math.ceil(math.log2(hosts) + 1) * (heads / cluster.tcp + cluster.latency)
    speed = cluster.nvlink if hosts == 1 else cluster.network
    return (workers - 1) * (costs.tokens * TOKEN_BYTES / speed + cluster.latency)


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
    usual = Cluster()
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="METRICS", help="of 1 worker, then of others")
    mb = VECTOR_BYTES / 1e6
    parser.add_argument("--vector-mb", type=float, default=mb, help="bytes of the adapter's gradient (%(default)s)")
    parser.add_argument("--row-tokens", type=float, default=256.0, help="tokens of a row (%(default)s)")
    parser.add_argument("--shortest", type=float, help="shortest row, where rows are ragged")
    parser.add_argument("--load-seconds", type=float, default=usual.load, help="of a new gang (%(default)s)")
    parser.add_argument("--failure-hours", type=float, default=usual.failure_hours, help="of a device (%(default)s)")
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.runs]
    if short := [str(path) for path, rows in zip(arguments.runs, runs, strict=True) if len(rows) < 2]:
        parser.error(f"{', '.join(short)}: fewer than 2 steps, and a step is timed from the end of the one before")
    if any(row.get("exchange/wait_seconds") is not None or row.get("offpolicy/lag_max") for row in runs[0]):
        parser.error(f"{arguments.runs[0]}: the first run must be one of a single worker, without steps sampled ahead")
    costs = calibrated(runs[0], arguments.row_tokens, arguments.shortest)
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
    one = whole_step(runs[0])
    for path, rows in zip(arguments.runs, runs, strict=True):
        workers = round(mean(rows, "rollout/tokens") / costs.tokens)
        predicted, found = predict(workers)["step"], whole_step(rows)
        efficiencies = f"efficiency {one / found:.3f}, predicted {alone / predicted:.3f}"
        print(f"  {workers} workers: step {found:.3f} s, predicted {predicted:.3f}; {efficiencies}   {path}")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a run after its first steps, in which it compiles."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows[WARM_UP:] if len(rows) > WARM_UP + 1 else rows


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(row[name] for row in rows)


def whole_step(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds from the end of a step to the end of the next."""
    return fmean(after["time"] - before["time"] for before, after in pairwise(rows))


if __name__ == "__main__":
    sys.exit(main())
