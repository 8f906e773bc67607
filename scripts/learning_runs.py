"""Does every preset learn? Whole training runs of the nano model on the arithmetic recipe, each until its target."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from job import SCRIPTS, clean_environment
from report import print_table

from parallm.metrics.json_lines import read_rows

SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Greedy accuracy on held-out problems, to be reached within so many steps."""

    accuracy: float = 0.85
    steps: int = 60


RECIPE = Target()
"""What the quickstart must do: 85% within the 60 steps of the recipe."""
TARGETS: Mapping[str, Target] = {
    "grpo": RECIPE,
    "bnpo": RECIPE,
    "dr_grpo": RECIPE,
    "dapo": RECIPE,
    "gspo": RECIPE,
    "cispo": RECIPE,
    "rloo": RECIPE,
    "reinforce_pp": RECIPE,
    "dppo": RECIPE,
    "sapo": RECIPE,
}
"""One for all, with the recipe's learning rate: on strictly on-policy batches a ratio is 1, so no clip or gate slows a
preset down, and AdamW divides out how large its gradient is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, which ends at its target. Row k of `steps` is step k + 1."""

    preset: str
    seed: int
    target: Target
    evaluations: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    group_size: int

    @property
    def accuracy_before(self) -> float:
        return float(self.evaluations[0]["heldout/accuracy"])

    @property
    def accuracy_after(self) -> float:
        return float(self.evaluations[-1]["heldout/accuracy"])

    @property
    def steps_to_target(self) -> int | None:
        """Finished steps at the first evaluation that reached the target; None if none did."""
        return next((int(row["step"]) for row in self.evaluations if is_reached(row, self.target)), None)

    @property
    def samples(self) -> int:
        """Completions that these steps have sampled, those of groups without signal included."""
        return sum(int(row["groups/sampled"]) for row in self._counted) * self.group_size

    @property
    def seconds(self) -> float:
        """Of these steps, evaluations excluded."""
        return sum(float(row["seconds/total"]) for row in self._counted)

    @property
    def _counted(self) -> Sequence[Mapping[str, Any]]:
        """The steps up to the target, or all of them."""
        return self.steps[: self.steps_to_target]


def is_reached(row: Mapping[str, Any], target: Target) -> bool:
    return bool(row["heldout/accuracy"] >= target.accuracy)


def check_presets(presets: Sequence[str], seeds: int, *overrides: str) -> dict[str, float]:
    """Train each preset with each seed and, as a control, the first with a learning rate of 0. Returns the figures.

    `overrides` of `python -m parallm.train` hold for all runs.
    """
    runs = []
    for preset in presets:
        for seed in range(seeds):
            runs.append(trained(preset, seed, TARGETS[preset], *overrides))
            print(f"{preset}, seed {seed}, {runs[-1].samples} samples: {curve(runs[-1])}", file=sys.stderr, flush=True)
    control = trained(presets[0], 0, TARGETS[presets[0]], "learner.learning_rate=0", *overrides)
    header = ("preset", "seed", "target", "before", "after", "steps to it", "samples to it", "seconds")
    rows = [header, *(row(run) for run in runs), row(control, f"{control.preset}, rate 0")]
    print_table("Learning arithmetic: nano model, held-out accuracy, each run until its target", rows)
    return {
        "presets.reached": sum(
            all(run.steps_to_target is not None for run in runs if run.preset == preset) for preset in presets
        ),
        "presets.total": len(presets),
        "presets.worst_accuracy": min(run.accuracy_after for run in runs),
        "presets.control_accuracy": control.accuracy_after,
    }


def trained(preset: str, seed: int, target: Target, *overrides: str) -> Run:
    """Train until the target is reached, or to the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "parallm.train", "+recipe=arithmetic_grpo", f"learner={preset}", f"seed={seed}"),
            *(f"trainer.steps={target.steps}", "trainer.evaluate_every=4", "checkpoint.every=1000"),
            *("server=off", "metrics.display=off", f"hydra.run.dir={run}", *overrides),
        ]
        with training(command, Path(folder) / "output") as process:
            while process.poll() is None and not any(is_reached(row, target) for row in evaluations(run)):
                time.sleep(SECONDS_BETWEEN_LOOKS)
        return Run(
            preset=preset,
            seed=seed,
            target=target,
            evaluations=evaluations(run),
            steps=read_rows(run / "metrics.jsonl"),
            group_size=yaml.safe_load((run / "config.yaml").read_text())["rollout"]["group_size"],
        )


@contextmanager
def training(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training run that is asked to stop at the end of the block. Raises RuntimeError if it failed."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=SCRIPTS.parent, env=clean_environment(), stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait()
    if process.returncode not in (0, 130):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def evaluations(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "evaluations.jsonl")


def curve(run: Run) -> str:
    return "  ".join(f"{row['step']}: {row['heldout/accuracy']:.3f}" for row in run.evaluations)


def row(run: Run, name: str | None = None) -> tuple[str, ...]:
    reached = run.steps_to_target is not None
    target = f"{run.target.accuracy:.0%} in {run.target.steps}"
    accuracies = f"{run.accuracy_before:.1%}", f"{run.accuracy_after:.1%}"
    arrived = (str(run.steps_to_target), str(run.samples)) if reached else ("not reached", "-")
    return name or run.preset, str(run.seed), target, *accuracies, *arrived, f"{run.seconds:.0f}"
