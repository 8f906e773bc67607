"""Speed and memory of an update on a GPU: ours, mlx-lm's LoRA training code, and PyTorch with PEFT.

The same shape with random weights, bfloat16, LoRA of rank 16 on all linear layers, one optimizer step. Tokens per
second count every row's prompt and completion. Ours runs with its defaults, each peer with the pass size that suits it
best of those tried. All run a second time, the other way round, since a GPU that has been busy is slower.
Sharing: groups of 8 with prompts as long as completions, against the same rows with a prompt of their own each.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from report import last_json, print_figures, print_table
from shapes import SHAPES, UpdateJob

SCRIPTS = Path(__file__).parent
OURS, MLX_LM, TORCH = "update_shape", "mlx_lm_update_shape", "torch_update_shape"
NAMES = {OURS: "parallm", MLX_LM: "mlx-lm", TORCH: "PyTorch + PEFT"}
HEAD_TOKENS, HEAD_VOCABULARY = 4096, 151_936
DEFAULT = 0
Found = dict[str, Any]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=16, help="of 1024 tokens (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="of a row, half of it prompt (default: %(default)s)")
    parser.add_argument("--passes", type=int, nargs="*", default=[1, 2, 4, 8], help="rows of a peer's pass to try")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and peft")
    parser.add_argument("--only", nargs="*", default=[OURS, MLX_LM, TORCH], help="workers to run")
    arguments = parser.parse_args()
    half = arguments.length // 2
    job = UpdateJob(
        shape=arguments.shape, groups=arguments.rows, group_size=1, prompt=half, completion=half, micro_batch=1
    )
    pythons = {TORCH: arguments.torch_python}
    best = {
        worker: best_of(worker, job, passes_of(worker, arguments.passes), pythons.get(worker, sys.executable))
        for worker in arguments.only
    }
    for worker in reversed(arguments.only):
        if found := best[worker]:
            again = run(worker, replace(job, micro_batch=found["rows"]).dump(), pythons.get(worker, sys.executable))
            found["seconds"] += again["seconds"] if again else []
            print(f"  {NAMES[worker]}: {', '.join(f'{seconds:.3f}' for seconds in found['seconds'])} s", flush=True)
    figures: dict[str, float | None] = {}
    rows: list[tuple[str, ...]] = [("", "tokens/s", "median s", "peak GB", "rows of a pass")]
    rows += [update_row(NAMES[worker], job, found) for worker, found in best.items() if found]
    if ours := best.get(OURS):
        figures["update.8b.peak_gb"] = ours["peak_gb"]
        for worker, name in ((MLX_LM, "update.8b.vs_mlx_lm"), (TORCH, "update.8b.vs_torch_peft")):
            if peer := best.get(worker):
                figures[name] = seconds_of(peer) / seconds_of(ours)
        shared_job = replace(job, groups=job.groups // 8, group_size=8)
        shared = best_of(OURS, shared_job, passes_of(OURS, arguments.passes), sys.executable)
        if shared:
            rows.append(update_row("parallm, prompts shared by 8", shared_job, shared))
            figures["update.prompt_sharing_gain"] = seconds_of(ours) / seconds_of(shared)
    print_table(f"One update: {arguments.shape}, {arguments.rows} x {arguments.length} tokens", rows)
    head = run("head_memory", f"[{HEAD_TOKENS}, {HEAD_VOCABULARY}]", sys.executable)
    if head:
        print(
            f"head: {head['chunked'] / 1e6:.0f} MB in chunks, {head['whole'] / 1e6:.0f} MB with all logits; "
            f"largest relative difference {head['difference']:.1e}"
        )
        figures["head.memory_ratio"] = head["chunked"] / head["whole"]
    print_figures(figures)


def best_of(worker: str, job: UpdateJob, passes: Sequence[int], python: str) -> Found | None:
    """The fastest run; passes that do not fit into memory are left out."""
    found: list[Found] = []
    for rows in passes:
        if result := run(worker, replace(job, micro_batch=rows).dump(), python):
            found.append(result | {"rows": rows})
            print(f"  {NAMES[worker]}: passes of {shown(rows)}: {seconds_of(result):.2f} s", flush=True)
    return min(found, key=seconds_of) if found else None


def passes_of(worker: str, passes: Sequence[int]) -> Sequence[int]:
    """Rows of a pass to try; DEFAULT leaves it to the trainer."""
    return [DEFAULT] if worker == OURS else passes


def shown(rows: int) -> str:
    return "default" if rows == DEFAULT else str(rows)


def run(worker: str, argument: str, python: str) -> Found | None:
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [python, str(SCRIPTS / "workers" / f"{worker}.py"), argument]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode != 0:
        print(f"  {worker} {argument} failed: {done.stderr.strip()[-600:]}", flush=True)
        return None
    return last_json(done.stdout)


def seconds_of(found: Found) -> float:
    return median(found["seconds"])


def update_row(who: str, job: UpdateJob, found: Found) -> tuple[str, ...]:
    peak = f"{found['peak_gb']:.1f}" if found["peak_gb"] else "-"
    seconds = seconds_of(found)
    return who, f"{job.tokens / seconds:.0f}", f"{seconds:.2f}", peak, shown(found["rows"])


if __name__ == "__main__":
    main()
