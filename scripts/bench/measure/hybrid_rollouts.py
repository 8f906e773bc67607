"""Rollouts of hybrid models with random weights: rows that share steps beside rows one by one and BatchGenerator."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.compare import print_table, ratio
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import work_in_parts


@measurement({"hybrid.cpu.rollouts_vs_by_row": Bar(min=5), "hybrid.cpu.cpu_seconds_vs_by_row": Bar()}, minutes=4)
def hybrid_rollouts_cpu(request: Request) -> Figures:
    """Seconds of 32 rows one by one over those together, and CPU seconds: 25 million parameters, prompts of 16 to 64
    tokens and completions of 24 to 96, in turns."""
    job = {"shape": "hybrid-25m", "rows": request.size(32, 8), "prompt": 64, "new": request.size(96, 24)}
    sides = ["ragged.rows", "ragged.by_row"]
    seconds, cpu_seconds = results(job | {"rounds": request.size(5, 1), "sides": sides})
    return {
        "hybrid.cpu.rollouts_vs_by_row": ratio(seconds["ragged.by_row"], seconds["ragged.rows"]),
        "hybrid.cpu.cpu_seconds_vs_by_row": ratio(cpu_seconds["ragged.by_row"], cpu_seconds["ragged.rows"]),
    }


@measurement(
    {
        **{f"hybrid.gpu.{size}.rows_vs_by_row": Bar() for size in ("0.8b", "4b")},
        **{f"hybrid.gpu.{size}.vs_batchgenerator": Bar() for size in ("0.8b", "4b")},
        "hybrid.gpu.rows_vs_by_row": Bar(min=8, needs="gpu"),
        "hybrid.gpu.vs_batchgenerator": Bar(min=1.5, needs="gpu"),
    },
    minutes=8,
    needs="gpu",
)
def hybrid_rollouts_gpu(request: Request) -> Iterator[Figures]:
    """32 rows of Qwen3.5's shapes: ragged ones (prompts of 32 to 128 tokens, completions of 16 to 64) one by one over
    together, and those of equal lengths with BatchGenerator over ours; the worse shape."""
    worst: Figures = {}
    for size in ("0.8b", "4b"):
        shape = "hybrid-tiny" if request.is_quick else f"qwen3.5-{size}"
        job = {"shape": shape, "rows": request.size(32, 4), "prompt": 128, "new": request.size(64, 16)}
        job |= {"rounds": request.size(2, 1), "sides": None}
        found, _ = results(job)
        own = {
            "rows_vs_by_row": ratio(found["ragged.by_row"], found["ragged.rows"]),
            "vs_batchgenerator": ratio(found["equal.batch_generator"], found["equal.rows"]),
        }
        worst = {name: min(value, worst.get(name) or value) for name, value in own.items()}
        yield {f"hybrid.gpu.{size}.{name}": value for name, value in own.items()}
    yield {f"hybrid.gpu.{name}": value for name, value in worst.items()}


def results(job: dict[str, Any]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each side's rounds, of the wall and of the CPU; prints the speeds by the wall."""
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu_seconds: dict[str, list[float]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for part in work_in_parts("hybrid_rollouts", is_peer=False, **job):
        seconds[part["side"]].append(part["seconds"])
        cpu_seconds[part["side"]].append(part["cpu_seconds"])
        speeds[part["side"]].append(part["tokens"] / part["seconds"])
    rows = [(side, median(values), " ".join(f"{one:.0f}" for one in values)) for side, values in speeds.items()]
    print_table(f"{job['shape']}: tokens/s", [("", "median", "all"), *rows])
    return seconds, cpu_seconds
