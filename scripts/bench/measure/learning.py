"""On a GPU: updates of ragged rows, serving beside learning, quantized bases, and what all of it takes of memory.

Random weights, every shape in turn in one process. Updates are on groups of 8 completions of 16 to 1,024 tokens. Of
ragged rows the control is the path without our kernels; of serving, a process whose streams wait for updates. 64
streams run one request after the other, without HTTP; an update beside them has 32 completions. A base in 4 bits gets
half of the memory that bfloat16's update took at most.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from bench.compare import p99, print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import work_in_parts
from bench.workers.loads import LEARNING_MODES, LearningLoad

SMALL = LearningLoad(
    groups=2,
    group_size=4,
    prompt=16,
    lengths=(4, 32),
    repeats=1,
    streams=8,
    outputs=(8, 32),
    served_groups=1,
    seconds=2.0,
    publishes=3,
    kv_cache_bytes=64 << 20,
)
SMALL_SHAPES = {"8b": "tiny", "0.5b": "tiny", "8b-4bit": "tiny-4bit", "8b-8bit": "tiny-8bit"}
LIMIT = 560.0
"""Seconds of the process."""
JOBS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "gpu.update.": {"8b": ("ragged", "equal"), "0.5b": ("ragged", "equal", "rectangles")},
    "serving.gpu.publish": {"8b": ("publish",)},
    "serving.gpu.": {"8b": ("streams",)},
    "memory.gpu.": {"8b": ("memory",)},
    "quantized.gpu.4bit": {"8b": ("ragged",), "8b-4bit": ("short", "half")},
    "quantized.gpu.8bit": {"8b": ("ragged",), "8b-8bit": ("short",)},
}
"""Shapes and their parts by the beginnings of figures, of which the first counts."""
ORDER = ("ragged", "half", "short", "publish", "streams", "equal", "memory", "rectangles")
SERVED, SHOWN = Bar(max=1.2, needs="gpu"), Bar()
Found = Mapping[str, Mapping[str, Any]]
"""By shape and part: `8b.ragged`."""


@measurement(
    {
        "gpu.update.ragged_vs_equal": Bar(min=0.85, needs="gpu"),
        "gpu.update.8b.tokens_per_second": SHOWN,
        "gpu.update.05b.tokens_per_second": SHOWN,
        "gpu.update.control_ragged_vs_equal": Bar(max=0.85, needs="gpu"),
        "serving.gpu.itl_ratio_10_updates": SERVED,
        "serving.gpu.throughput_ratio_10_updates": Bar(min=0.83, needs="gpu"),
        "serving.gpu.updates_per_minute_10_updates": Bar(min=9, needs="gpu"),
        "serving.gpu.itl_ratio_30_updates_first": SHOWN,
        "serving.gpu.throughput_ratio_30_updates_first": SHOWN,
        "serving.gpu.updates_per_minute_30_updates_first": SHOWN,
        "serving.gpu.itl_ratio_latency_target": SERVED,
        "serving.gpu.mean_itl_ratio_latency_target": SERVED,
        "serving.gpu.throughput_ratio_latency_target": SHOWN,
        "serving.gpu.updates_per_minute_latency_target": SHOWN,
        "serving.gpu.tokens_per_second": SHOWN,
        "serving.gpu.errors": Bar(max=0),
        "serving.gpu.control_throughput_ratio": Bar(max=0.83, needs="gpu"),
        "serving.gpu.publish_p99_ms": Bar(max=1, needs="gpu"),
        "serving.gpu.publish_failed_requests": Bar(max=0),
        "memory.gpu.vs_two_copies": SHOWN,
        **{f"quantized.gpu.{bits}bit.update_vs_full": Bar(min=0.7, needs="gpu") for bits in (4, 8)},
        "quantized.gpu.4bit.peak_vs_full": Bar(max=0.5, needs="gpu"),
        "quantized.gpu.8bit.peak_vs_full": SHOWN,
    },
    minutes=3,
    needs="gpu",
    is_quick_anywhere=True,
)
def learning_gpu(request: Request) -> Iterator[Figures]:
    """Figures as soon as their parts are there; a part that fails costs its own."""
    wanted: dict[str, set[str]] = {}
    for name in filter(request.wants, FIGURES):
        for shape, parts in next(jobs for beginning, jobs in JOBS.items() if name.startswith(beginning)).items():
            wanted.setdefault(shape, set()).update(parts)
    shapes, load = (SMALL_SHAPES, SMALL) if request.is_quick else ({}, LearningLoad())
    jobs_of_shapes = [(one, shapes.get(one, one), sorted(parts, key=ORDER.index)) for one, parts in wanted.items()]
    found: dict[str, Mapping[str, Any]] = {}
    for part in work_in_parts("learning_parts", is_peer=False, limit=LIMIT, jobs=jobs_of_shapes, load=asdict(load)):
        print(f"  {told(part)}", flush=True)
        if "error" not in part:
            found[part["part"]] = part
            yield learning_figures(found)
    if "8b.streams" in found:
        print_streams(found["8b.streams"])


def told(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part for people: long lists by their medians and lengths."""
    return {
        name: told(value)
        if isinstance(value, Mapping)
        else f"median {median(value):.4g} of {len(value)}"
        if isinstance(value, list) and len(value) > 4
        else value
        for name, value in part.items()
    }


def learning_figures(found: Found) -> Figures:
    """Those whose parts are there."""
    figures: Figures = {}
    for name, figure in FIGURES.items():
        with suppress(KeyError):
            figures[name] = figure(found)
    return figures


def print_streams(streams: Mapping[str, Any]) -> None:
    rows = [(mode, *traffic_row(streams[mode])) for mode in ("alone", *LEARNING_MODES) if mode in streams]
    header = ("", "tokens/s", "p50 ms", "mean ms", "p99 ms", "first token p50 ms", "updates/min", "s an update")
    print_table("64 streams beside learning, 8B", [header, *rows])


def traffic_row(one: Mapping[str, Any]) -> tuple[object, ...]:
    times = median(one["gaps"]), fmean(one["gaps"]), p99(one["gaps"]), median(one["first"])
    updates = one.get("updates_per_minute", "-"), median(one.get("update_seconds") or [0.0])
    return (one["tokens"] / one["seconds"], *(1e3 * time for time in times), *updates)


def speed(part: Mapping[str, Any]) -> float:
    return float(part["tokens"] / median(part["seconds"]))


def ragged_vs_equal(found: Found) -> float:
    """Of the shape that does worse."""
    return min(speed(found[f"{shape}.ragged"]) / speed(found[f"{shape}.equal"]) for shape in ("8b", "0.5b"))


def control_ragged_vs_equal(found: Found) -> float:
    return speed(found["0.5b.rectangles"]) / speed(found["0.5b.equal"])


def of_mode(mode: str, what: Callable[[Mapping[str, Any]], float]) -> Callable[[Found], float]:
    """`what` of the streams in a mode over that of the streams alone."""
    return lambda found: what(found["8b.streams"][mode]) / what(found["8b.streams"]["alone"])


def middle_gap(traffic: Mapping[str, Any]) -> float:
    return median(traffic["gaps"])


def mean_gap(traffic: Mapping[str, Any]) -> float:
    return fmean(traffic["gaps"])


def throughput(traffic: Mapping[str, Any]) -> float:
    return float(traffic["tokens"] / traffic["seconds"])


def update_rate(mode: str) -> Callable[[Found], float]:
    return lambda found: float(found["8b.streams"][mode]["updates_per_minute"])


def num_errors(found: Found) -> float:
    return sum(len(found["8b.streams"][mode]["errors"]) for mode in ("alone", *LEARNING_MODES))


PACKED = {4: "8b-4bit.half", 8: "8b-8bit.short"}


def update_vs_full(bits: int) -> Callable[[Found], float]:
    return lambda found: speed(found[PACKED[bits]]) / speed(found["8b.ragged"])


def peak_vs_full(bits: int) -> Callable[[Found], float]:
    return lambda found: float(found[PACKED[bits]]["peak_gb"] / found["8b.ragged"]["peak_gb"])


FIGURES: Mapping[str, Callable[[Found], float]] = {
    "gpu.update.ragged_vs_equal": ragged_vs_equal,
    "gpu.update.8b.tokens_per_second": lambda found: speed(found["8b.ragged"]),
    "gpu.update.05b.tokens_per_second": lambda found: speed(found["0.5b.ragged"]),
    "gpu.update.control_ragged_vs_equal": control_ragged_vs_equal,
    **{
        f"serving.gpu.{name}_{mode}": figure
        for mode in ("10_updates", "30_updates_first", "latency_target")
        for name, figure in (
            ("itl_ratio", of_mode(mode, middle_gap)),
            ("throughput_ratio", of_mode(mode, throughput)),
            ("updates_per_minute", update_rate(mode)),
        )
    },
    "serving.gpu.mean_itl_ratio_latency_target": of_mode("latency_target", mean_gap),
    "serving.gpu.tokens_per_second": lambda found: throughput(found["8b.streams"]["alone"]),
    "serving.gpu.errors": num_errors,
    "serving.gpu.control_throughput_ratio": of_mode("control", throughput),
    "serving.gpu.publish_p99_ms": lambda found: p99(found["8b.publish"]["publish"]),
    "serving.gpu.publish_failed_requests": lambda found: float(found["8b.publish"]["failed"]),
    "memory.gpu.vs_two_copies": lambda found: found["8b.memory"]["shared"] / found["8b.memory"]["two_copies"],
    **{f"quantized.gpu.{bits}bit.update_vs_full": update_vs_full(bits) for bits in (4, 8)},
    **{f"quantized.gpu.{bits}bit.peak_vs_full": peak_vs_full(bits) for bits in (4, 8)},
}
