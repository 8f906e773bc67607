"""Completions sampled until 80% of the held-out problems are solved: ours against TRL's GRPOTrainer.

Same nano model, problems, seeds, prompts and completions per step, sampling, adapter, learning rates and Adam; each
side with its own learner. Ours is `python -m parallm.train +recipe=arithmetic_grpo` as it is; TRL runs on torch's CPU
in an environment of its own and reads its settings from the config.yaml of our run.

- Samples are all completions drawn in training: those of groups that refilling replaces, too. Both sides are evaluated
  greedily after each step on the same problems; the first evaluation that reaches the target counts. Where nothing is
  refilled a ratio of 1 therefore says that both needed equally many steps.
- Order: TRL's own shuffling is off, and its data set is what our problem stream gives. Where we refill, problems come
  from the same stream, so that our step k is further along in it than TRL's.
- Seeds: the same numbers, but not the same random numbers: LoRA's A and the samples are drawn by MLX and by torch.
- Both divide advantages by the standard deviation of the group and average over all tokens.
- Seconds are those of training steps, evaluations left out. TRL's are those of torch on this CPU with transformers'
  `generate`: they say nothing about a GPU with vLLM.
"""

import json
import math
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from job import SCRIPTS, clean_environment, run_program
from peers import DEFAULT_FOLDER, torch_python
from report import last_json, print_figures, print_table

import parallm

TRL, TORCH = "1.16.0", "2.13.0"
REQUIREMENTS = (f"trl=={TRL}", "peft==0.21.2", "transformers==5.23.0", "pydantic")
"""Pydantic is what our environments' settings need."""
NANO = Path(parallm.__file__).parent / "model" / "nano"
TARGET = 0.8
OURS, PEER = "parallm", "TRL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. Entry k of `sampled` and `seconds` is step k + 1."""

    accuracies: Sequence[tuple[int, float]]
    """Step (0: before training) and held-out accuracy."""
    sampled: Sequence[int]
    seconds: Sequence[float]

    @property
    def steps_to_target(self) -> int | None:
        """Finished steps at the first evaluation that reached the target; None if none did."""
        return next((step for step, accuracy in self.accuracies if accuracy >= TARGET), None)

    @property
    def samples_to_target(self) -> int | None:
        return None if self.steps_to_target is None else sum(self.sampled[: self.steps_to_target])

    @property
    def seconds_to_target(self) -> float | None:
        return None if self.steps_to_target is None else sum(self.seconds[: self.steps_to_target])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both sides with one seed."""

    seed: int
    ours: Run
    trl: Run

    @property
    def ratio(self) -> float:
        """Our samples / TRL's. Infinite if we do not arrive; if only TRL does not, at most what is returned."""
        if self.ours.samples_to_target is None:
            return math.inf
        return self.ours.samples_to_target / (self.trl.samples_to_target or sum(self.trl.sampled))


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="at most, of each side (default: %(default)s)")
    parser.add_argument(
        "--evaluate-every", type=int, default=1, help="steps between evaluations (default: %(default)s)"
    )
    parser.add_argument("--problems", type=int, default=512, help="of an evaluation (default: %(default)s)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where TRL is installed")
    arguments = parser.parse_args()
    python = torch_python(arguments.peers, "trl", TORCH, REQUIREMENTS)
    pairs = [compare(seed, arguments, python) for seed in range(arguments.seeds)]
    header = ("seed", "", "before", "best", "steps to 80%", "samples to 80%", "seconds to 80%", "seconds a step")
    rows = [row(pair.seed, who, run) for pair in pairs for who, run in ((OURS, pair.ours), (PEER, pair.trl))]
    print_table(f"Learning to {TARGET:.0%}: ours and TRL {TRL} (torch {TORCH}, CPU)", [header, *rows])
    print_figures(figures_of(pairs))


def compare(seed: int, arguments: Namespace, python: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        ours = train_ours(seed, arguments, run)
        config = yaml.safe_load((run / "config.yaml").read_text())
    show(seed, OURS, ours)
    trl = train_trl(config, python)
    show(seed, PEER, trl)
    return Pair(seed=seed, ours=ours, trl=trl)


def show(seed: int, who: str, run: Run) -> None:
    curve = "  ".join(f"{step}: {accuracy:.3f}" for step, accuracy in run.accuracies)
    print(f"seed {seed}, {who}: {sum(run.sampled)} samples; accuracy after step {curve}", file=sys.stderr)


def train_ours(seed: int, arguments: Namespace, folder: Path) -> Run:
    command = [sys.executable, "-m", "parallm.train", "+recipe=arithmetic_grpo", f"seed={seed}"]
    overrides = [
        *(f"trainer.steps={arguments.steps}", f"trainer.evaluate_every={arguments.evaluate_every}"),
        *(f"trainer.evaluate_problems={arguments.problems}", "checkpoint.every=1000"),
        *("server=off", "metrics.display=off", f"hydra.run.dir={folder}"),
    ]
    run_program([*command, *overrides], clean_environment(), SCRIPTS.parent)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    steps = read_rows(folder / "metrics.jsonl")
    return Run(
        accuracies=[(row["step"], row["heldout/accuracy"]) for row in read_rows(folder / "evaluations.jsonl")],
        sampled=[row["groups/sampled"] * config["rollout"]["group_size"] for row in steps],
        seconds=[row["seconds/total"] for row in steps],
    )


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train_trl(config: dict[str, Any], python: str) -> Run:
    """TRL with the settings of our run; it stops at the target."""
    job = {"model": str(NANO), "target": TARGET, "config": config}
    environment = clean_environment() | {"PYTHONPATH": str(SCRIPTS.parent), "HF_HUB_OFFLINE": "1"}
    worker = SCRIPTS / "workers" / "trl_samples.py"
    return Run(**last_json(run_program([python, str(worker), json.dumps(job)], environment)))


def row(seed: int, who: str, run: Run) -> tuple[str, ...]:
    accuracies = [accuracy for _, accuracy in run.accuracies]
    reached = (run.steps_to_target, run.samples_to_target, run.seconds_to_target)
    texts = ["not reached" if value is None else f"{value:.0f}" for value in reached]
    mean = f"{sum(run.seconds) / len(run.seconds):.2f}"
    return str(seed), who, f"{accuracies[0]:.1%}", f"{max(accuracies):.1%}", *texts, mean


def figures_of(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """None where a side did not reach the target."""
    ratio = median(pair.ratio for pair in pairs)
    figures: dict[str, float | None] = {"trl.samples_to_80_ratio": ratio if math.isfinite(ratio) else None}
    for pair in pairs:
        for who, run in (("ours", pair.ours), ("trl", pair.trl)):
            figures[f"trl.seed_{pair.seed}.{who}_samples_to_80"] = run.samples_to_target
            figures[f"trl.seed_{pair.seed}.{who}_seconds_to_80"] = run.seconds_to_target
    return figures


if __name__ == "__main__":
    main()
