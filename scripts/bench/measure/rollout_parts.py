"""Rollouts of one process alone and beside another on the next GPU: what a host that both share costs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import work_in_parts
from parallm.distributed.launcher import devices

WARM_UP = 2
"""Rounds that do not count."""
Rounds = Sequence[Mapping[str, float]]


@measurement(
    {
        **{f"rollouts.gpu.{part}_fraction": Bar() for part in ("launch", "wait", "python")},
        **{f"rollouts.gpu.{kind}": Bar() for kind in ("beside_another", "beside_another_own_cores")},
    },
    minutes=2,
    needs="gpus2",
    is_quick_anywhere=True,
)
def rollout_parts(request: Request) -> Iterator[Figures]:
    """0.5B, 128 rows x 256 tokens of an adapter, updates between: shares of the device thread's time, alone; seconds
    beside a process on the next GPU over alone, wherever the threads run and with half of the cores for each."""
    job = {"shape": "0.5b", "rows": 128, "new": 256, "rounds": 8}
    if request.is_quick:
        job = {"shape": "tiny", "rows": 16, "new": 8, "rounds": 3}
    [alone] = run(job, 1)
    names = ("launch", "wait", "python")
    yield {f"rollouts.gpu.{name}_fraction": middle(alone, f"{name}_seconds") / middle(alone) for name in names}
    yield {"rollouts.gpu.beside_another": max(map(middle, run(job, 2))) / middle(alone)}
    pinned = run(job, 2, has_own_cores=True)
    yield {"rollouts.gpu.beside_another_own_cores": max(map(middle, pinned)) / middle(alone)}


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
