"""Rollouts of one process alone and beside another on the next GPU: what a host that both share costs."""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
from typing import Any

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import run_program, work_in_parts
from parallm.distributed.launcher import devices

WARM_UP = 2
"""Rounds that do not count."""
MAX_CORES = 16
SPEED = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
ends, count = time.perf_counter() + 0.1, 0
while time.perf_counter() < ends:
    for _ in range(1000):
        count += 1
print(count)
"""
"""Additions in a tenth of a second on one core."""
Rounds = Sequence[Mapping[str, float]]


@measurement(
    {
        **{f"rollouts.gpu.{part}_fraction": Bar() for part in ("launch", "wait", "python")},
        **{f"rollouts.gpu.{kind}": Bar() for kind in ("beside_another", "beside_another_own_cores")},
        "rollouts.gpu.alone_over_slower_of_two": Bar(),
        "rollouts.gpu.slowest_core": Bar(),
    },
    minutes=2,
    needs="gpus2",
    is_quick_anywhere=True,
)
def rollout_parts(request: Request) -> Iterator[Figures]:
    """0.5B, 128 rows x 256 tokens of an adapter, updates between: shares of the device thread's time, alone; seconds
    beside a process on the next GPU over alone, wherever the threads run and with half of the cores for each.

    The other two say what chance costs workers that wait for each other: the median of the rounds alone over the mean
    of the slower of any two of them; and the slowest of some idle cores over the fastest."""
    yield {"rollouts.gpu.slowest_core": slowest_core()}
    job = {"shape": "0.5b", "rows": 128, "new": 256, "rounds": 10}
    if request.is_quick:
        job = {"shape": "tiny", "rows": 16, "new": 8, "rounds": 4}
    [alone] = run(job, 1)
    names = ("launch", "wait", "python")
    yield {f"rollouts.gpu.{name}_fraction": middle(alone, f"{name}_seconds") / middle(alone) for name in names}
    slower = [max(pair) for pair in itertools.combinations([one["seconds"] for one in alone], 2)]
    yield {"rollouts.gpu.alone_over_slower_of_two": middle(alone) / mean(slower) if slower else None}
    yield {"rollouts.gpu.beside_another": max(map(middle, run(job, 2))) / middle(alone)}
    pinned = run(job, 2, has_own_cores=True)
    yield {"rollouts.gpu.beside_another_own_cores": max(map(middle, pinned)) / middle(alone)}


def slowest_core() -> float:
    """The speed of the slowest of the first cores over that of the fastest, one after the other."""
    cores = sorted(os.sched_getaffinity(0))[:MAX_CORES]
    counts = [int(run_program([sys.executable, "-c", SPEED, str(core)])) for core in cores]
    return min(counts) / max(counts)


def middle(rounds: Rounds, name: str = "seconds") -> float:
    return median(one[name] for one in rounds)


def run(job: Mapping[str, Any], size: int, *, has_own_cores: bool = False) -> list[Rounds]:
    """The rounds of `size` processes at once, each on a GPU of its own."""
    gpus, cores = devices(), sorted(os.sched_getaffinity(0))

    def rounds(place: int) -> Rounds:
        own = cores[place * len(cores) // size : (place + 1) * len(cores) // size] if has_own_cores else None
        variables = {"CUDA_VISIBLE_DEVICES": gpus[place]} if place < len(gpus) else {}
        parts = work_in_parts("rollout_parts", is_peer=False, environment=variables, **job, cores=own)
        return list(parts)[WARM_UP:]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rounds, range(size)))
    for place, own in enumerate(found):
        names = tuple(name for name in own[0] if name != "took")
        print_table(f"process {place} of {size}", [names, *(tuple(one[name] for name in names) for one in own)])
    return found
