"""Seconds of an update and of a whole GRPO step: ours, mlx-lm-lora's, and a loop written by hand with mlx-lm.

Update: the same completions for both, all tokens trained on, one optimizer step. mlx-lm-lora runs its own `train_grpo`
in an environment of its own, with our BLAS. Tokens are completion tokens: both compute the prompts too, mlx-lm-lora
once for each completion (this version; older ones left the prompt out), we once for each group.
Step: sampling, scoring, update; the same problems, no refill, a learning rate so small that all sample from the same
policy. Ours is `python -m parallm.train` as it is, read from its metrics.jsonl. How many tokens a step samples differs
by chance, and on how many it trains by design: we and the naive loop leave out groups without signal, mlx-lm-lora
trains on all. So steps are compared by the seconds of a token that is sampled and trained on: of sampling over the
tokens sampled, and of all else over the tokens trained on. Seconds of whole steps are shown, too.

mlx-lm-lora is measured twice:
- `grpo_step.cpu.vs_mlx_lm_lora_same_blas`: with our BLAS loaded before MLX, on as many problems as we have. The
  difference is the program's.
- `grpo_step.cpu.vs_mlx_lm_lora`: as `pip install mlx-lm-lora 'mlx[cpu]'` leaves it, with the BLAS of MLX's wheel (on
  Linux the reference one; on a Mac there is no other). The difference is what a user gets, most of it the BLAS. A step
  of ours takes it many minutes, so it gets fewer problems and one timed step.
mlx-lm-lora decodes and trains as many rows together as there are problems in a step. With fewer problems it keeps the
rows of the large step, or it would be slower for our choice alone.
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping
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
PIP_STEPS = 1
"""Timed steps of the peer as pip installs it, after one that warms up."""
OURS, NAIVE = "parallm", "naive loop"
PEER, PIP_PEER = "mlx-lm-lora, our BLAS", "mlx-lm-lora as pip installs it"
Seconds = dict[str, list[float]]


@dataclass(slots=True)
class Steps:
    """Whole GRPO steps, the first of each process left out, with their completion tokens."""

    seconds: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    """Seconds of them."""
    sampled: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)

    def add(self, found: Mapping[str, list[float]]) -> None:
        self.seconds += found["seconds"]
        self.sampling += found["rollout"]
        self.sampled += found["tokens"]
        self.trained += found["trained"]

    @property
    def seconds_per_token(self) -> float:
        """To sample a completion token, and to train on one."""
        sampling = sum(self.sampling)
        return sampling / sum(self.sampled) + (sum(self.seconds) - sampling) / sum(self.trained)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=16, help="problems of a step, 8 completions each")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument(
        "--pip-prompts", type=int, default=2, help="for mlx-lm-lora as pip installs it; 0: leave it out (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="alternating processes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="updates or steps in each (default: %(default)s)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where peers are installed")
    parser.add_argument("--no-peer", action="store_true", help="leave mlx-lm-lora out altogether")
    arguments = parser.parse_args()
    job = replace(
        base_job(arguments), prompts=arguments.prompts, max_tokens=arguments.max_tokens, repeats=arguments.repeats
    )
    python = None if arguments.no_peer else peer_python(arguments.peers, "mlx-lm-lora", f"mlx-lm-lora=={PEER_VERSION}")
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, trajectories=str(Path(folder) / "trajectories.json"))
        tokens = int(run_worker("sample_trajectories", job)["tokens"])
        update = measure_updates(job, arguments.rounds, python)
        steps = measure_steps(job, arguments.rounds, python, Path(folder))
        if python is not None and arguments.pip_prompts:
            steps[PIP_PEER] = pip_steps(job, arguments.pip_prompts, python)
    print_table(
        f"One update: {arguments.model}, {job.prompts} x {job.group_size} completions, {tokens} completion tokens",
        [("", "median s", "tokens/s", "this / ours", "all s"), *(update_row(who, update, tokens) for who in update)],
    )
    print_table(
        f"One GRPO step: {arguments.model}, {job.prompts} problems x {job.group_size}, {job.max_tokens} tokens",
        [
            ("", "problems", "median s", "of it sampling", "sampled", "trained on", "ms a token", "/ ours", "all s"),
            *(step_row(who, steps, arguments.pip_prompts if who == PIP_PEER else job.prompts) for who in steps),
        ],
    )
    print_figures(
        {
            "learner.cpu.tokens_per_second": tokens / median(update[OURS]),
            "learner.cpu.vs_mlx_lm_lora": slower(update, PEER),
            "grpo_step.cpu.vs_mlx_lm_lora": slower_per_token(steps, PIP_PEER),
            "grpo_step.cpu.vs_mlx_lm_lora_same_blas": slower_per_token(steps, PEER),
            "grpo_step.cpu.vs_naive": slower_per_token(steps, NAIVE),
            "grpo_step.cpu.seconds": median(steps[OURS].seconds),
            "grpo_step.cpu.naive_seconds": median(steps[NAIVE].seconds),
        },
        device=blas_name(job),
    )


def update_row(who: str, update: Seconds, tokens: int) -> tuple[str, ...]:
    middle = median(update[who])
    return who, f"{middle:.2f}", f"{tokens / middle:.0f}", f"{middle / median(update[OURS]):.2f}", listed(update[who])


def step_row(who: str, steps: dict[str, Steps], problems: int) -> tuple[str, ...]:
    found = steps[who]
    tokens = f"{fmean(found.sampled):.0f}", f"{fmean(found.trained):.0f}"
    per_token = f"{found.seconds_per_token * 1000:.2f}", f"{slower_per_token(steps, who):.2f}"
    seconds = f"{median(found.seconds):.2f}", f"{median(found.sampling):.2f}"
    return who, str(problems), *seconds, *tokens, *per_token, listed(found.seconds)


def listed(seconds: list[float]) -> str:
    return " ".join(f"{one:.2f}" for one in seconds)


def slower(found: Seconds, who: str) -> float | None:
    """How many times our seconds `who` needs."""
    return median(found[who]) / median(found[OURS]) if who in found else None


def slower_per_token(steps: dict[str, Steps], who: str) -> float | None:
    """How many times our seconds for a token `who` needs."""
    return steps[who].seconds_per_token / steps[OURS].seconds_per_token if who in steps else None


def measure_updates(job: Job, rounds: int, python: str | None) -> Seconds:
    seconds: Seconds = defaultdict(list)
    for _ in range(rounds):
        seconds[OURS] += run_worker("update_speed", job)["seconds"]
        if python is not None:
            seconds[PEER] += run_peer(replace(job, rows=job.prompts), python, our_blas(job))["seconds"]
    return seconds


def measure_steps(job: Job, rounds: int, python: str | None, folder: Path) -> dict[str, Steps]:
    steps: dict[str, Steps] = defaultdict(Steps)
    for place in range(rounds):
        one = replace(job, seed=place)
        steps[OURS].add(our_steps(one, folder / f"run-{place}"))
        steps[NAIVE].add(run_worker("naive_grpo", one, peer=True))
        if python is not None:
            steps[PEER].add(run_peer(replace(one, rows=job.prompts, samples=True), python, our_blas(job)))
    return steps


def pip_steps(job: Job, prompts: int, python: str) -> Steps:
    """Steps of mlx-lm-lora with the BLAS of MLX's wheel on the first problems, as many rows at a time as before."""
    fewer = replace(job, prompts=prompts, rows=job.prompts, repeats=PIP_STEPS, samples=True)
    steps = Steps()
    steps.add(run_peer(fewer, python, {}))
    return steps


def our_steps(job: Job, folder: Path) -> dict[str, list[float]]:
    """What `Steps.add` takes, of each step but the first, which warms up."""
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
    metrics = folder / "checkpoints" / "bench" / "latest" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    names = {"seconds": "seconds/total", "rollout": "seconds/rollout", "tokens": "rollout/tokens"}
    names["trained"] = "update/tokens"
    return {name: [float(row.get(metric, 0)) for row in rows] for name, metric in names.items()}


def run_peer(job: Job, python: str, blas: dict[str, str]) -> dict[str, list[float]]:
    """mlx-lm-lora with the variables in `blas`, `job.rows` completions at a time; without any: as pip installs it."""
    nano = Path(parallm.__file__).parent / "model" / "nano"
    model = str(nano) if job.model == "nano" else job.model
    variables = {"BENCH_BLAS_LIBRARY": "", "PYTHONPATH": ""} | blas
    return run_worker("mlx_lm_lora_speed", replace(job, model=model), peer=True, python=python, environment=variables)


def our_blas(job: Job) -> dict[str, str]:
    """What makes a peer multiply matrices with our library."""
    report = load_blas(job.device)  # harmless here: this process never loads MLX, and it sets MKL_CBWR
    variables = {"BENCH_BLAS_LIBRARY": str(report.path or "")}
    return variables | ({"MKL_CBWR": os.environ["MKL_CBWR"]} if "MKL_CBWR" in os.environ else {})


if __name__ == "__main__":
    main()
