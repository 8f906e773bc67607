"""Does an engine stand thousands of ragged requests: memory, traces of compiled steps, faults.

The embedded model, in memory that makes rows give up theirs all the time; see `workers/soak.py`. Memory is that of live
arrays, once the caches have been emptied, from when as many versions are kept as are ever kept: drift is what the last
third of the readings differs by from the first, spread what the most differs by from the least. A shorter soak with
compiled steps counts how often one is traced; the bound is the number of buckets of rows, positions and kinds of
adapters that the longest context allows. On a CPU that needs g++.
"""

import shutil
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from job import Job, blas_name, run_worker
from report import print_figures, print_table

KV_CACHE_BYTES = 6_000_000
WARM_UP = 2
"""Readings of memory, of five versions each: the table of versions keeps eight."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of the soak (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="that they come in (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="that decode together (default: %(default)s)")
    arguments = parser.parse_args()
    job = Job(
        prompts=arguments.requests, steps=arguments.rounds, rows=arguments.rows, kv_cache_bytes=KV_CACHE_BYTES, seed=1
    )
    found = run_worker("soak", job)
    compiled: dict[str, Any] = {}
    if shutil.which("g++"):
        compiled = run_worker("soak", replace(job, prompts=max(50, arguments.requests // 10), steps=10, compiles=True))
    active = found["active"][WARM_UP:] or found["active"]
    resident = found["resident"][WARM_UP:] or found["resident"]
    ends = found["ends"]
    rows = [
        ("requests", f"{sum(ends.values())}, of which {ends.get('left', 0)} left, {ends.get('lost', 0)} lost"),
        ("sampled tokens", f"{found['tokens']}"),
        ("preemptions, hits of the prefix cache", f"{found['preemptions']}, {found['prefix_hits']}"),
        ("live arrays, least and most", f"{min(active) / 1e6:.2f} and {max(active) / 1e6:.2f} MB"),
        ("resident, least and most", f"{min(resident) / 1e6:.1f} and {max(resident) / 1e6:.1f} MB"),
        ("faults, requests that ended with one", f"{len(found['next_seconds'])}, {found['failed_in_step']}"),
        ("next request, median and slowest", f"{median(found['next_seconds']):.2f} and {worst(found):.2f} s"),
    ]
    if compiled:
        rows.append(("traces of compiled steps, bound", f"{compiled['traces']}, {compiled['buckets']}"))
    print_table(f"Soak: the embedded model, {arguments.rows} rows", [("", ""), *rows])
    print_figures(
        {
            "engine.soak.requests": sum(ends.values()),
            "engine.soak.lost": ends.get("lost", 0),
            "engine.soak.memory_drift": drift(active),
            "engine.soak.memory_spread": max(active) / min(active) - 1,
            "engine.soak.resident_drift": drift(resident),
            "engine.soak.leaked_kv_bytes": found["held"],
            "engine.soak.preemptions": found["preemptions"],
            "engine.soak.prefix_hits": found["prefix_hits"],
            "engine.soak.failed_in_step": found["failed_in_step"],
            "engine.soak.failed_besides": found["failed_besides"],
            "engine.soak.next_request_seconds": worst(found),
            "engine.soak.traces": compiled.get("traces"),
            "engine.soak.traces_over_buckets": compiled["traces"] / compiled["buckets"] if compiled else None,
        },
        device=blas_name(job),
    )


def drift(sizes: Sequence[int]) -> float:
    """How far the last third of readings is from the first, on average."""
    count = max(1, len(sizes) // 3)
    return abs(mean(sizes[-count:]) / mean(sizes[:count]) - 1)


def worst(found: dict[str, Any]) -> float:
    return float(max(found["next_seconds"]))


if __name__ == "__main__":
    main()
