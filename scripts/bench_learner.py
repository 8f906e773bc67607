"""Seconds of an update and of a whole GRPO step: ours, mlx-lm-lora's, and a loop written by hand with mlx-lm.

Update: the same completions for both, all tokens trained on, one optimizer step. mlx-lm-lora runs its own `train_grpo`
in an environment of its own. Tokens are completion tokens: both compute the prompts too, mlx-lm-lora once for each
completion (this version; older ones left the prompt out), we once for each group.
Step: sampling, scoring, update; the same problems, no refill, a learning rate so small that all sample from the same
policy. Ours is `python -m parallm.train` as it is, read from its metrics.jsonl. We and the naive loop leave out groups
without signal; mlx-lm-lora trains on all. What each sampled and trained on is shown, since it differs by chance.
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from job import Job, add_model_options, base_job, blas_name, clean_environment, run_program, run_worker
from peers import DEFAULT_FOLDER, peer_python
from problems import environment_overrides
from report import print_figures, print_table

import parallm
from parallm.device.blas import load_blas

PEER_VERSION = "5.10.2"
OURS, PEER, NAIVE = "parallm", "mlx-lm-lora", "naive loop"
Seconds = dict[str, list[float]]


@dataclass(slots=True)
class Steps:
    """Whole GRPO steps, the first of each process left out, with their completion tokens."""

    seconds: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)

    def add(self, seconds: list[float], sampled: list[float], trained: list[float]) -> None:
        self.seconds += seconds
        self.sampled += sampled
        self.trained += trained


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
    python = None if arguments.no_peer else peer_python(arguments.peers, PEER, f"{PEER}=={PEER_VERSION}")
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, trajectories=str(Path(folder) / "trajectories.json"))
        tokens = int(run_worker("sample_trajectories", job)["tokens"])
        update = measure_updates(job, arguments.rounds, python)
        steps = measure_steps(job, arguments.rounds, python, Path(folder))
    print_table(
        f"One update: {arguments.model}, {job.prompts} x {job.group_size} completions, {tokens} completion tokens",
        [("", "median s", "tokens/s", "this / ours", "all s"), *(update_row(who, update, tokens) for who in update)],
    )
    print_table(
        f"One GRPO step: {arguments.model}, {job.prompts} problems x {job.group_size}, {job.max_tokens} tokens",
        [
            ("", "median s", "this / ours", "tokens sampled", "trained on", "all s"),
            *(step_row(who, steps) for who in steps),
        ],
    )
    step = {who: found.seconds for who, found in steps.items()}
    print_figures(
        {
            "learner.cpu.tokens_per_second": tokens / median(update[OURS]),
            "learner.cpu.vs_mlx_lm_lora": slower(update, PEER),
            "grpo_step.cpu.vs_mlx_lm_lora": slower(step, PEER),
            "grpo_step.cpu.vs_naive": slower(step, NAIVE),
        },
        device=blas_name(job),
    )


def update_row(who: str, update: Seconds, tokens: int) -> tuple[str, ...]:
    middle = median(update[who])
    return who, f"{middle:.2f}", f"{tokens / middle:.0f}", f"{middle / median(update[OURS]):.2f}", listed(update[who])


def step_row(who: str, steps: dict[str, Steps]) -> tuple[str, ...]:
    found = steps[who]
    middle = median(found.seconds)
    tokens = f"{fmean(found.sampled):.0f}", f"{fmean(found.trained):.0f}"
    return who, f"{middle:.2f}", f"{middle / median(steps[OURS].seconds):.2f}", *tokens, listed(found.seconds)


def listed(seconds: list[float]) -> str:
    return " ".join(f"{one:.2f}" for one in seconds)


def slower(found: Seconds, who: str) -> float | None:
    """How many times our seconds `who` needs."""
    return median(found[who]) / median(found[OURS]) if who in found else None


def measure_updates(job: Job, rounds: int, python: str | None) -> Seconds:
    seconds: Seconds = defaultdict(list)
    for _ in range(rounds):
        seconds[OURS] += run_worker("update_speed", job)["seconds"]
        if python is not None:
            seconds[PEER] += run_peer(job, python)["seconds"]
    return seconds


def measure_steps(job: Job, rounds: int, python: str | None, folder: Path) -> dict[str, Steps]:
    steps: dict[str, Steps] = defaultdict(Steps)
    for place in range(rounds):
        one = replace(job, seed=place)
        steps[OURS].add(*our_steps(one, folder / f"run-{place}"))
        naive = run_worker("naive_grpo", one, peer=True)
        steps[NAIVE].add(naive["seconds"], naive["tokens"], naive["trained"])
        if python is not None:
            peer = run_peer(replace(one, samples=True), python)
            steps[PEER].add(peer["seconds"], peer["tokens"], peer["tokens"])
    return steps


def our_steps(job: Job, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Seconds, sampled tokens and trained tokens of each step but the first, which warms up."""
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
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    names = ("seconds/total", "rollout/tokens", "update/tokens")
    seconds, sampled, trained = ([float(row.get(name, 0)) for row in rows] for name in names)
    return seconds, sampled, trained


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
