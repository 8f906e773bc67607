"""A whole GRPO step on a GPU (sample, score, update, publish): ours against TRL's GRPOTrainer.

Both load the same random weights from one folder: bfloat16, LoRA of rank 16 on all linear layers. Every completion has
the full length, since no side can sample the end token. Ours is `python -m parallm.train`; TRL samples with
transformers, all completions of a step in one batch. With vLLM it would sample faster: that is not measured here. Each
side has the pass size that suits it best of those tried, and TRL that way of transformers to sample, tried in short
runs. The first steps warm up; medians of the rest.
"""

import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from job import SCRIPTS, clean_environment, run_program
from report import last_json, print_figures, print_table
from shapes import SHAPES, GrpoJob
from tuning import Settings, described, tune

OURS, TRL = "grpo_shape", "trl_grpo_shape"
NAMES = {OURS: "parallm", TRL: "TRL"}
PARTS = ("seconds", "sampling", "scoring", "update")
LONGEST_REASON = 600
Found = dict[str, Any]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, default=16, help="of a step (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="completions of a prompt (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--completion", type=int, default=256, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64], help="of our training pass, to try")
    parser.add_argument(
        "--trl-rows", type=int, nargs="*", default=[128, 64, 32], help="per device batch of TRL, to try"
    )
    parser.add_argument(
        "--trl-generation", nargs="*", default=["plain", "static", "continuous"], help="of transformers, to try"
    )
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch, trl and peft")
    parser.add_argument("--model", help="folder for the weights, kept (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = GrpoJob(
            shape=arguments.shape,
            model=arguments.model or folder,
            prompts=arguments.prompts,
            group_size=arguments.group_size,
            prompt=arguments.prompt,
            completion=arguments.completion,
            steps=arguments.steps,
            warm_up=arguments.warm_up,
        )
        if not (Path(job.model) / "config.json").exists():
            run("random_checkpoint", job, arguments.torch_python)
        trl = {"rows": arguments.trl_rows, "generation": arguments.trl_generation}
        best = {
            OURS: best_of(OURS, job, {"rows": arguments.rows}, sys.executable),
            TRL: best_of(TRL, job, trl, arguments.torch_python),
        }
    header = ("", *(f"{part} s" if part != "seconds" else "step s" for part in PARTS))
    header += ("tokens/s of the step", "sampled", "trained", "peak GB", "settings")
    title = f"One GRPO step: {job.shape}, {job.prompts} x {job.group_size}, {job.prompt} + {job.completion} tokens"
    print_table(title, [header, *(row(who, job, found) for who, found in best.items() if found)])
    print_figures(figures_of(best))


def best_of(worker: str, job: GrpoJob, choices: Mapping[str, Sequence[Any]], python: str) -> Found | None:
    """A run with the settings that are fastest; what does not fit into memory, or does not run, is left out.

    Raises ValueError for missing tokens.
    """
    short = replace(job, warm_up=1, steps=1)

    def seconds_of(settings: Settings) -> float | None:
        found = tried(worker, short, settings, python)
        return None if found is None else median(found["seconds"])

    (best, *_) = tune({name: values[0] for name, values in choices.items()}, choices, seconds_of)
    return None if best.seconds is None else tried(worker, job, best.settings, python)


def tried(worker: str, job: GrpoJob, settings: Settings, python: str) -> Found | None:
    try:
        found = run(worker, replace(job, **settings), python)
    except RuntimeError as error:
        print(f"  {NAMES[worker]}, {described(settings)}, failed: {str(error)[-LONGEST_REASON:]}", flush=True)
        return None
    for kind in ("sampled_tokens", "trained_tokens"):
        if set(found[kind]) != {job.sampled_tokens}:
            raise ValueError(f"{NAMES[worker]}: {kind} {found[kind]}, expected {job.sampled_tokens} in each step")
    print(f"  {NAMES[worker]}, {described(settings)}: {listed(found)}", flush=True)
    return found | {"settings": settings}


def run(worker: str, job: GrpoJob, python: str) -> Found:
    """Raises RuntimeError with the worker's last words."""
    variables = clean_environment()
    variables |= {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), variables["PYTHONPATH"]]), "HF_HUB_OFFLINE": "1"}
    return last_json(run_program([python, str(SCRIPTS / "workers" / f"{worker}.py"), job.dump()], variables))


def listed(found: Found) -> str:
    parts = ", ".join(f"{part} {median(found[part]):.2f}" for part in PARTS[1:])
    return f"{' '.join(f'{one:.2f}' for one in found['seconds'])} s ({parts})"


def row(who: str, job: GrpoJob, found: Found) -> tuple[str, ...]:
    whole, sampling, _, update = seconds = [median(found[part]) for part in PARTS]
    speeds = (job.sampled_tokens / whole, job.sampled_tokens / sampling, job.trained_tokens / update)
    peak = f"{found['peak_gb']:.1f}" if found["peak_gb"] else "-"
    return (
        NAMES[who],
        *(f"{one:.3f}" for one in seconds),
        *(f"{speed:.0f}" for speed in speeds),
        peak,
        described(found["settings"]),
    )


def figures_of(best: dict[str, Found | None]) -> dict[str, float | None]:
    """None where a side has not run."""
    ours, trl = best[OURS], best[TRL]
    ratio = median(trl["seconds"]) / median(ours["seconds"]) if ours and trl else None
    figures: dict[str, float | None] = {"grpo_step.vs_trl_gpu": ratio}
    for who, found in best.items():
        name = f"grpo_step.gpu.{NAMES[who].lower()}"
        if found:
            figures |= {f"{name}.{part}": median(found[part]) for part in PARTS}
            figures[f"{name}.peak_gb"] = found["peak_gb"]
    return figures


if __name__ == "__main__":
    main()
