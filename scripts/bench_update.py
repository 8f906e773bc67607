"""Speed and memory of an update on a GPU: ours, mlx-lm's LoRA training code, and PyTorch with PEFT.

The same shape with random weights, bfloat16, LoRA of rank 16 on all linear layers, one optimizer step. Tokens per
second count every row's prompt and completion. Ours runs with its defaults; each peer looks for the settings with which
it is fastest, and prints what it has tried. All run a second time, the other way round, since a GPU that has been busy
is slower. mlx-lm is run twice: with its own loss, which computes logits for prompts, too, and with one that leaves them
out, as ours and PyTorch's do.
Sharing: groups of 8 with prompts as long as completions, against the same rows with a prompt of their own each.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from report import last_json, print_figures, print_table
from shapes import SHAPES, UpdateJob
from tuning import described

SCRIPTS = Path(__file__).parent
HEAD_TOKENS, HEAD_VOCABULARY = 4096, 151_936
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    worker: str
    settings: Mapping[str, Any] | None = None
    """That it does not choose by itself."""
    figure: str | None = None
    """Its seconds over ours."""


OURS, TORCH = "parallm", "torch"
SIDES = {
    OURS: Side(name="parallm", worker="update_shape"),
    "mlx_lm": Side(name="mlx-lm", worker="mlx_lm_update_shape", settings={"head": "all"}, figure="update.8b.vs_mlx_lm"),
    "mlx_lm_same_head": Side(
        name="mlx-lm, head for completions",
        worker="mlx_lm_update_shape",
        settings={"head": "completions"},
        figure="update.8b.vs_mlx_lm_same_head",
    ),
    TORCH: Side(name="PyTorch + PEFT", worker="torch_update_shape", figure="update.8b.vs_torch_peft"),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=16, help="of 1024 tokens (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="of a row, half of it prompt (default: %(default)s)")
    parser.add_argument("--passes", type=int, nargs="*", default=[4, 1, 2, 8], help="rows of a peer's pass to try")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and peft")
    parser.add_argument("--only", nargs="*", default=list(SIDES), choices=SIDES, help="sides to run")
    arguments = parser.parse_args()
    half = arguments.length // 2
    job = UpdateJob(
        shape=arguments.shape,
        groups=arguments.rows,
        group_size=1,
        prompt=half,
        completion=half,
        passes=tuple(arguments.passes),
    )
    pythons = {TORCH: arguments.torch_python}
    found = {who: first(who, job, pythons.get(who, sys.executable)) for who in arguments.only}
    for who in reversed(arguments.only):
        if one := found[who]:
            again = run(who, replace(job, settings=one.get("settings")), pythons.get(who, sys.executable))
            one["seconds"] += again["seconds"] if again else []
            print(f"  {SIDES[who].name}: {listed(one['seconds'])}", flush=True)
    rows: list[tuple[str, ...]] = [("", "tokens/s", "median s", "peak GB", "settings")]
    rows += [update_row(SIDES[who].name, job, one) for who, one in found.items() if one]
    figures = figures_of(found)
    if ours := found.get(OURS):
        shared_job = replace(job, groups=job.groups // 8, group_size=8)
        if shared := run(OURS, shared_job, sys.executable):
            rows.append(update_row("parallm, prompts shared by 8", shared_job, shared))
            figures["update.prompt_sharing_gain"] = seconds_of(ours) / seconds_of(shared)
    print_table(f"One update: {arguments.shape}, {arguments.rows} x {arguments.length} tokens", rows)
    if ours:
        figures |= head_figures()
    print_figures(figures)


def first(who: str, job: UpdateJob, python: str) -> Found | None:
    """With the settings that are best, where there are some to choose."""
    settings = SIDES[who].settings
    found = run(who, replace(job, settings=None if settings is None else dict(settings)), python)
    for tried, seconds in (found or {}).get("tried", []):
        print(f"  {SIDES[who].name}: {described(tried)}: {f'{seconds:.2f} s' if seconds else 'failed'}", flush=True)
    if found:
        print(f"  {SIDES[who].name}: {listed(found['seconds'])}", flush=True)
    return found


def listed(seconds: Sequence[float]) -> str:
    return f"{', '.join(f'{one:.3f}' for one in seconds)} s"


def run(who: str, job: UpdateJob, python: str) -> Found | None:
    return run_worker(SIDES[who].worker, job.dump(), python)


def run_worker(worker: str, argument: str, python: str = sys.executable) -> Found | None:
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [python, str(SCRIPTS / "workers" / f"{worker}.py"), argument]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode != 0:
        print(f"  {worker} {argument} failed: {done.stderr.strip()[-600:]}", flush=True)
        return None
    return last_json(done.stdout)


def figures_of(found: Mapping[str, Found | None]) -> dict[str, float | None]:
    """None where a side has failed."""
    ours = found.get(OURS)
    figures: dict[str, float | None] = {}
    if OURS in found:
        figures["update.8b.peak_gb"] = ours["peak_gb"] if ours else None
    for who, one in found.items():
        if figure := SIDES[who].figure:
            figures[figure] = seconds_of(one) / seconds_of(ours) if one and ours else None
    return figures


def head_figures() -> dict[str, float | None]:
    head = run_worker("head_memory", f"[{HEAD_TOKENS}, {HEAD_VOCABULARY}]")
    if head is None:
        return {"head.memory_ratio": None}
    print(
        f"head: {head['chunked'] / 1e6:.0f} MB in chunks, {head['whole'] / 1e6:.0f} MB with all logits; "
        f"largest relative difference {head['difference']:.1e}"
    )
    return {"head.memory_ratio": head["chunked"] / head["whole"]}


def seconds_of(found: Found) -> float:
    return median(found["seconds"])


def update_row(who: str, job: UpdateJob, found: Found) -> tuple[str, ...]:
    peak = f"{found['peak_gb']:.1f}" if found["peak_gb"] else "-"
    seconds = seconds_of(found)
    settings = described(found["settings"]) if "settings" in found else "defaults"
    return who, f"{job.tokens / seconds:.0f}", f"{seconds:.2f}", peak, settings


if __name__ == "__main__":
    main()
