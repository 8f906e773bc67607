"""Speed of the engine on a GPU, against mlx-lm's BatchGenerator and against what the hardware allows.

Random weights, bfloat16, greedy unless said; 128 prompt tokens and 128 new ones unless said. Every part has warmed up
before it counts; medians. One process per shape and side, so that each has the memory for itself; its parts are
measured one after the other, and one that fails or does not end costs its own figures only. BatchGenerator looks for
the settings with which it is fastest; the table says which they are.

floor: the time to read all weights once, at 90% of the 4.8 TB/s that an H200 is sold with.
lora, lora8: decode steps of 32 rows of one version, and of eight versions in turns, against rows of the base.
sampling16: rows that differ in temperature, top-k, top-p and min-p; penalties16: in penalties and biases, too.
mixed: prompts and outputs of all lengths, arriving as a Poisson process; tokens/s until the last one has ended.
join: what one row that joins or leaves costs beside 16 rows of 2,048 positions, over a step.
host: seconds of ten million additions in Python. A step of few rows waits for the host, and hosts differ by a factor;
beside each step stand the CPU milliseconds that it took of the engine's thread.
group: prompt tokens that are computed for groups of 8, over those of all rows.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

from engine_loads import check_same_work
from job import SCRIPTS, worker_environment
from report import print_figures, print_table
from shapes import SHAPES, EngineJob
from tuning import described

OURS, THEIRS = "engine_shape", "batch_generator_shape"
PARTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (OURS, "05b"): ("b1", "b128", "group"),
    (THEIRS, "05b"): ("b1", "b128"),
    (OURS, "8b"): ("b1", "b32", "b128", "lora", "lora8", "sampling16", "penalties16", "join", "mixed"),
    (THEIRS, "8b"): ("b128", "mixed"),
}
"""In the order of running."""
BYTES_PER_SECOND = 4.3e12
QUICK = {"new": 8, "prompt": 16, "repeats": 1, "cached": 64, "churn": 8, "group_prompt": 64, "requests": 8}
QUICK_LENGTHS = {"prompts": (4, 64), "outputs": (2, 16)}
Found = dict[str, dict[str, Any]]
"""By side, shape and part: `engine_shape.8b.b1`; and `host`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    value: float
    ours: str
    beside: str


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shape-8b", default="8b", choices=sorted(SHAPES), help="what stands for it")
    parser.add_argument("--shape-05b", default="0.5b", choices=sorted(SHAPES), help="what stands for it")
    parser.add_argument("--only", nargs="*", choices=sorted(choices()), metavar="PART", help="such as 8b.b1 05b.b128")
    parser.add_argument("--repeats", type=int, default=3, help="that count (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=560, help="seconds of a process (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for everything measured, written after each part")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few tokens: does it run?")
    arguments = parser.parse_args()
    jobs = {"8b": EngineJob(shape=arguments.shape_8b, parts=()), "05b": EngineJob(shape=arguments.shape_05b, parts=())}
    sizes: dict[str, Any] = {"shape": "tiny", **QUICK, **QUICK_LENGTHS} if arguments.quick else {}
    found: Found = {"host": {"seconds": host_seconds()}}
    print(f"  host: {found['host']['seconds']:.2f} s", flush=True)
    for (worker, shape), parts in PARTS.items():
        wanted = tuple(part for part in parts if not arguments.only or f"{shape}.{part}" in arguments.only)
        job = replace(jobs[shape], **{"repeats": arguments.repeats, "parts": wanted, **sizes})
        for part, result in run(worker, job, arguments.limit):
            found[f"{worker}.{shape}.{part}"] = result
            print(f"  {worker} {shape} {part}: {json.dumps(result)}", flush=True)
            if arguments.out:
                write(arguments.out, found)
    figures = figures_of(found)
    header = ("figure", "value", "ours", "beside")
    rows = [(name, f"{one.value:.3f}", one.ours, one.beside) if one else (name, "-", "", "") for name, one in figures]
    print_table("The engine on a GPU" + (", tiny" if arguments.quick else ""), [header, *rows])
    print_figures({name: one.value if one else None for name, one in figures})


def host_seconds() -> float:
    began, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - began


def choices() -> set[str]:
    return {f"{shape}.{part}" for (_, shape), parts in PARTS.items() for part in parts}


def run(worker: str, job: EngineJob, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a worker finds, part by part; one that lasts longer than `limit` seconds is ended."""
    if not job.parts:
        return
    command = [sys.executable, str(SCRIPTS / "with_blas.py"), str(SCRIPTS / "workers" / f"{worker}.py"), job.dump()]
    left = set(job.parts)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=worker_environment(peer=worker == THEIRS)
    ) as process:
        clock = Timer(limit, process.kill)
        clock.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                result = json.loads(line)
                left.discard(part := result.pop("part"))
                yield part, result
        clock.cancel()
    if left:
        print(f"  {worker} ended with {process.returncode} before {', '.join(sorted(left))}", flush=True)


def write(path: Path, found: Found) -> None:
    values = {name: one.value if one else None for name, one in figures_of(found)}
    path.write_text(json.dumps({"figures": values, "found": found}, indent=1) + "\n")


def figures_of(found: Found) -> list[tuple[str, Figure | None]]:
    """None where a part is missing or has failed."""
    good = {name: result for name, result in found.items() if "error" not in result}
    figures: list[tuple[str, Figure | None]] = []
    for name, figure in FIGURES.items():
        try:
            figures.append((name, figure(good)))
        except KeyError:
            figures.append((name, None))
    return figures


def over_floor(part: str, found: Found) -> Figure:
    one = found[f"{OURS}.{part}"]
    floor, step = one["weight_bytes"] / BYTES_PER_SECOND, median(one["step_seconds"])
    return Figure(value=step / floor, ours=shown(one), beside=f"{floor * 1e3:.2f} ms floor")


def over_batch_generator(part: str, found: Found) -> Figure:
    both = [found[f"{side}.{part}"] for side in (OURS, THEIRS)]
    check_same_work(part, *both)
    ours, theirs = map(speed, both)
    settings = described(both[1]["settings"])
    return Figure(value=ours / theirs, ours=f"{ours:.0f} tokens/s", beside=f"{theirs:.0f} BatchGenerator, {settings}")


def speed(one: Mapping[str, Any]) -> float:
    return float(one["tokens"] / median(one["seconds"]))


def share_of_base(part: str, found: Found) -> Figure:
    one = found[f"{OURS}.{part}"]
    step, base = steps(one)
    return Figure(value=base / step, ours=shown(one), beside=f"base {shown(one['plain'])}")


def over_greedy(part: str, found: Found) -> Figure:
    one = found[f"{OURS}.{part}"]
    step, greedy = steps(one)
    return Figure(value=step / greedy, ours=shown(one), beside=f"greedy {shown(one['plain'])}")


def shown(one: Mapping[str, Any]) -> str:
    step, host = (median(one[name]) * 1e3 for name in ("step_seconds", "host_seconds"))
    return f"{step:.2f} ms a step, {host:.2f} of the host"


def steps(one: Mapping[str, Any]) -> tuple[float, float]:
    return median(one["step_seconds"]), median(one["plain"]["step_seconds"])


def over_rows(part: str, found: Found) -> Figure:
    one = found[f"{OURS}.{part}"]
    value = one["computed"] / one["of_rows"]
    return Figure(value=value, ours=f"{one['computed']} tokens", beside=f"{one['of_rows']} of all rows")


def change_over_step(part: str, found: Found) -> Figure:
    one = found[f"{OURS}.{part}"]
    plain, churn, changes = (median(one[name]) for name in ("plain_seconds", "churn_seconds", "changes"))
    cost = (churn - plain) / changes
    return Figure(value=cost / plain, ours=f"{cost * 1e3:.3f} ms", beside=f"{plain * 1e3:.2f} ms a step")


FIGURES: Mapping[str, Callable[[Found], Figure]] = {
    "engine.gpu.8b.b1.vs_floor": partial(over_floor, "8b.b1"),
    "engine.gpu.8b.b32.vs_floor": partial(over_floor, "8b.b32"),
    "engine.gpu.8b.b128.vs_batchgenerator": partial(over_batch_generator, "8b.b128"),
    "engine.gpu.05b.b1.vs_batchgenerator": partial(over_batch_generator, "05b.b1"),
    "engine.gpu.05b.b128.vs_batchgenerator": partial(over_batch_generator, "05b.b128"),
    "engine.gpu.8b.lora.vs_base": partial(share_of_base, "8b.lora"),
    "engine.gpu.8b.lora8.vs_base": partial(share_of_base, "8b.lora8"),
    "engine.gpu.mixed.vs_batchgenerator": partial(over_batch_generator, "8b.mixed"),
    "engine.group.prompt_tokens_ratio": partial(over_rows, "05b.group"),
    "engine.sampling16.vs_greedy": partial(over_greedy, "8b.sampling16"),
    "engine.penalties16.vs_greedy": partial(over_greedy, "8b.penalties16"),
    "engine.join.vs_step": partial(change_over_step, "8b.join"),
}


if __name__ == "__main__":
    main()
