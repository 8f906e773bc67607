"""Kernels of some decode steps of our engine on a GPU, as torch's profiler sees them, inside MLX's CUDA graphs, too."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from engine_parts import Bench
from parts import run_parts
from shapes import read_engine_job
from torch.profiler import ProfilerActivity, profile

STEPS = 12


def trace(bench: Bench, rows: int, versions: int) -> dict[str, Any]:
    """Name, begin and duration in microseconds of each, in their order."""
    engine = bench.decoding(rows, versions)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step("rollout")
    while engine.has_work("rollout"):
        engine.step("rollout")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [(one["ts"], one["dur"], one["name"]) for one in events if one.get("cat") == "kernel"]
    return {"kernels": [(name, begin, lasted) for begin, lasted, name in sorted(kernels)]}


JOB = read_engine_job(sys.argv[1])
BENCH = Bench(JOB)
CASES = {part: [int(number) for number in part.split("x")] for part in JOB.parts}
run_parts(JOB.parts, {part: partial(trace, BENCH, *numbers) for part, numbers in CASES.items()})
