"""Seconds of a sum over all ranks, in a chain of as many as a step has; one of the ranks.

`kernel` sums by a kernel that writes into the memory of the other GPUs, where there are some, `group` by NCCL or a
ring. `none` only multiplies by a number, as the others do after each sum. `apart` adds to the stream and norms it after
the kernel's sum, `fused` in the kernel of the sum.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import Team, join_team
from parallm.distributed.tensor_parallel import join_ranks
from parallm.model.kernels.add_norm import add_norm
from parallm.model.kernels.all_sum import all_sum
from parallm.model.kernels.sum_add_norm import fits, sum_add_norm

SUMS = 160
"""Of a step of 80 layers."""
TURNS = 6
EPS = 1e-5
Sum = Callable[[mx.array], mx.array]


def main(*, rows: list[int], hidden: int, workers: int, folder: str) -> dict[str, Any]:
    """Seconds of a sum of `hidden` numbers of each row, and of the host for it, by kind and rows."""
    settings = DistributedSettings(engine="mlx", workers=workers, timeout_seconds=120)
    with join_team(settings, Path(folder), {}) as team:
        assert isinstance(team, Team), "one of several ranks"
        ranks = join_ranks(team)
        peers = ranks.peers
        kinds: dict[str, Sum] = {
            "none": lambda x: x,
            "group": lambda x: mx.distributed.all_sum(x, group=ranks.group),
        }
        if peers is not None:
            weight, stream = mx.ones(hidden, mx.bfloat16), mx.zeros((max(rows), 1, hidden))
            kinds["kernel"] = lambda x: all_sum(x, peers)
            kinds["apart"] = lambda x: add_norm(all_sum(x, peers)[None], x, weight, EPS)[1]
            kinds["fused"] = lambda x: sum_add_norm(x[None], stream[: len(x)], weight, EPS, peers=peers)[1]
        found: dict[str, Any] = {}
        for count in rows:
            x = mx.ones((count, 1, hidden), mx.bfloat16)
            for kind, function in kinds.items():
                if kind in ("none", "group") or fits(x[None], x):
                    found[f"{kind}.{count}"] = timed(team, function, x, f"{kind} {count}")
        return found


def timed(team: Team, function: Sum, x: mx.array, label: str) -> dict[str, float]:
    """The fastest of some turns, which all ranks begin together."""

    def chain(x: mx.array) -> mx.array:
        for _ in range(SUMS):
            x = function(x) * 0.5
        return x

    compiled = mx.compile(chain)
    seconds, host_seconds = [], []
    for turn in range(TURNS):
        mx.eval(x)
        team.channel.gather(f"{label} {turn}", b"").result()
        began = time.perf_counter()
        y = compiled(x)
        mx.async_eval(y)
        host_seconds.append((time.perf_counter() - began) / SUMS)
        mx.eval(y)
        seconds.append((time.perf_counter() - began) / SUMS)
    return {"seconds": min(seconds), "host_seconds": min(host_seconds)}
