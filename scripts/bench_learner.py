"""Seconds of an update and of a whole GRPO step: ours, mlx-lm-lora's, and a loop written by hand with mlx-lm.

Update: the same completions for both, all tokens trained on, one optimizer step. mlx-lm-lora runs its own `train_grpo`
in an environment of its own. Tokens are completion tokens: both compute the prompts too, mlx-lm-lora once for each
completion (this version; older ones left the prompt out), we once for each group.
Step: sampling, scoring, update; the same problems, no refill, a learning rate so small that all sample from the same
policy. Ours is `python -m parallm.train` as it is, read from its metrics.jsonl.
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from job import Job, add_model_options, base_job, blas_name, clean_environment, run_program, run_worker
from peers import DEFAULT_FOLDER, peer_python
from problems import environment_overrides
from report import print_figures, print_table

import parallm
from parallm.device.blas import load_blas

PEER = "mlx-lm-lora==5.10.2"
Seconds = dict[str, list[float]]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=16, help="problems of a step, 8 completions each")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="alternating processes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="updates or steps in each (default: %(default)s)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where peers are installed")
    parser.add_argument("--no-peer", action="store_true", help="leave mlx-lm-lora out")
    arguments = parser.parse_args()
    job = replace(
        base_job(arguments), prompts=arguments.prompts, max_tokens=arguments.max_tokens, repeats=arguments.repeats
    )
    python = None if arguments.no_peer else peer_python(arguments.peers, "mlx-lm-lora", PEER)
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, trajectories=str(Path(folder) / "trajectories.json"))
        tokens = int(run_worker("sample_trajectories", job)["tokens"])
        update = measure_updates(job, arguments.rounds, python)
        step = measure_steps(job, arguments.rounds, python, Path(folder))
    rows = [("", "median s", "tokens/s", "this / ours", "all")]
    for name, found in (("update", update), ("step", step)):
        for who, seconds in found.items():
            ratio = f"{median(seconds) / median(found['parallm']):.2f}"
            speed = f"{tokens / median(seconds):.0f}"
            every = " ".join(f"{one:.2f}" for one in seconds)
            rows.append((f"{name}, {who}", f"{median(seconds):.2f}", speed, ratio, every))
    print_table(f"{arguments.model}: {job.prompts} x {job.group_size} completions, {tokens} completion tokens", rows)
    print_figures(
        {
            "learner.cpu.tokens_per_second": tokens / median(update["parallm"]),
            "learner.cpu.vs_mlx_lm_lora": slower(update, "mlx-lm-lora"),
            "grpo_step.cpu.vs_mlx_lm_lora": slower(step, "mlx-lm-lora"),
            "grpo_step.cpu.vs_naive": slower(step, "naive loop"),
        },
        device=blas_name(job),
    )


def slower(found: Seconds, who: str) -> float | None:
    """How many times our seconds `who` needs."""
    return median(found[who]) / median(found["parallm"]) if who in found else None


def measure_updates(job: Job, rounds: int, python: str | None) -> Seconds:
    seconds: Seconds = defaultdict(list)
    for _ in range(rounds):
        seconds["parallm"] += run_worker("update_speed", job)["seconds"]
        if python is not None:
            seconds["mlx-lm-lora"] += run_peer(job, python)["seconds"]
    return seconds


def measure_steps(job: Job, rounds: int, python: str | None, folder: Path) -> Seconds:
    seconds: Seconds = defaultdict(list)
    for place in range(rounds):
        one = replace(job, seed=place)
        seconds["parallm"] += our_steps(one, folder / f"run-{place}")
        seconds["naive loop"] += run_worker("naive_grpo", one, peer=True)["seconds"]
        if python is not None:
            seconds["mlx-lm-lora"] += run_peer(replace(one, samples=True), python)["seconds"]
    return seconds


def our_steps(job: Job, folder: Path) -> list[float]:
    """Seconds of each step but the first, which warms up."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "parallm.train", f"model.path={job.model}", f"device.blas={job.blas}"),
        *environment_overrides(job.data, job.prompts),
        *(f"rollout.problems_per_step={job.prompts}", f"rollout.group_size={job.group_size}"),
        *(f"rollout.max_tokens={job.max_tokens}", "rollout.refill_rounds=0", f"seed={job.seed}"),
        *(f"trainer.steps={job.repeats + 1}", "trainer.evaluate_problems=0", "learner.learning_rate=1e-6"),
        *("server=off", "name=bench", "metrics.display=off", "checkpoint.every=1000"),
    ]
    run_program(command, clean_environment(), folder)
    (metrics,) = folder.glob("checkpoints/bench/*/metrics.jsonl")
    return [json.loads(line)["seconds/total"] for line in metrics.read_text().splitlines()][1:]


def run_peer(job: Job, python: str) -> dict[str, list[float]]:
    """mlx-lm-lora with the BLAS that we use."""
    report = load_blas(job.device)  # harmless here: this process never loads MLX, and it sets MKL_CBWR
    variables = {"BENCH_BLAS_LIBRARY": str(report.path or ""), "PYTHONPATH": ""}
    if "MKL_CBWR" in os.environ:
        variables["MKL_CBWR"] = os.environ["MKL_CBWR"]
    nano = Path(parallm.__file__).parent / "model" / "nano"
    model = str(nano) if job.model == "nano" else job.model
    return run_worker("mlx_lm_lora_speed", replace(job, model=model), peer=True, python=python, environment=variables)


if __name__ == "__main__":
    main()
