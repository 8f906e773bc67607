"""Rollouts of hybrid models with random weights: rows that share steps beside rows one by one and BatchGenerator."""

import os
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import print_table, ratio
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import ROOT, SCRIPTS, work_in_parts

ROWS, BY_ROW = "ragged.rows", "ragged.by_row"
BEFORE = "070c6118027d99091017e9ba87a6daa1a0986208"
"""The last commit of this repository that computed hybrids row by row."""


def cpu_job(request: Request) -> dict[str, Any]:
    """25 million parameters, prompts of 16 to 64 tokens and completions of 24 to 96."""
    return {"shape": "hybrid-25m", "rows": request.size(32, 8), "prompt": 64, "new": request.size(96, 24)}


@measurement({"hybrid.cpu.rollouts_vs_before": Bar(min=5)}, minutes=6)
def hybrid_rollouts_before(request: Request) -> Figures:
    """Seconds of 32 rows by the code of before rows shared steps over those by today's, in turns. Needs the history of
    the repository."""
    job = cpu_job(request) | {"rounds": 1, "sides": [ROWS]}
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        check_out(BEFORE, Path(name))
        for number in range(request.size(3, 1)):
            for package in (str(ROOT), name) if number % 2 else (name, str(ROOT)):
                # safe path: or Python would find the package of the folder that it is started in
                own = {"PYTHONPATH": os.pathsep.join((package, str(SCRIPTS))), "PYTHONSAFEPATH": "1"}
                for part in work_in_parts("hybrid_rollouts", is_peer=False, environment=own, **job):
                    if part["package"] != f"{package}/parallm":
                        raise RuntimeError(f"{part['package']} ran in place of {package}/parallm")
                    seconds["before" if package == name else "today"].append(part["seconds"])
    rows = [(side, median(found), " ".join(f"{one:.1f}" for one in found)) for side, found in seconds.items()]
    print_table(f"{job['shape']}: seconds", [("", "median", "all"), *rows])
    return {"hybrid.cpu.rollouts_vs_before": ratio(seconds["before"], seconds["today"])}


def check_out(commit: str, folder: Path) -> None:
    """Write the package of another commit into `folder`. Raises CalledProcessError where git does not know it."""
    archive = folder / "package.tar"
    subprocess.run(["git", "-C", ROOT, "archive", f"--output={archive}", commit, "parallm"], check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


@measurement({"hybrid.cpu.rollouts_vs_by_row": Bar(min=5), "hybrid.cpu.cpu_seconds_vs_by_row": Bar()}, minutes=4)
def hybrid_rollouts_cpu(request: Request) -> Figures:
    """What sharing steps alone is worth: seconds and CPU seconds of 32 rows one by one over those together, in turns,
    all else as it is today."""
    seconds, cpu_seconds = results(cpu_job(request) | {"rounds": request.size(5, 1), "sides": [ROWS, BY_ROW]})
    return {
        "hybrid.cpu.rollouts_vs_by_row": ratio(seconds[BY_ROW], seconds[ROWS]),
        "hybrid.cpu.cpu_seconds_vs_by_row": ratio(cpu_seconds[BY_ROW], cpu_seconds[ROWS]),
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
            "rows_vs_by_row": ratio(found[BY_ROW], found[ROWS]),
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
