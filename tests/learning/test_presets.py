"""Every preset of `conf/learner` that samples learns arithmetic, and a learning rate of 0 learns nothing.

Each is trained on the arithmetic recipe with three seeds until its held-out accuracy is that of the quickstart: with
the recipe's learning rate that is the target of every preset. On strictly on-policy batches a ratio is 1, so no clip or
gate slows a preset down.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench.compare import print_table
from bench.measurement import request_of_tests
from bench.processes import ROOT, clean_environment, evaluations, metrics

TARGET, STEPS, SEEDS = 0.85, 60, 3
PRESETS = sorted(
    {file.stem for file in (ROOT / "conf" / "learner").glob("*.yaml")}
    - {"sft", "reward_model", "embedding", "classifier"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run, which ends at its target."""

    evaluations: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]

    @property
    def accuracies(self) -> list[float]:
        return [float(row["heldout/accuracy"]) for row in self.evaluations]

    @property
    def steps_to_target(self) -> int | None:
        """Finished steps at the first evaluation that reached the target; None if none did."""
        return next((int(row["step"]) for row in self.evaluations if is_reached(row)), None)

    @property
    def seconds(self) -> float:
        """The time of the steps up to the target, evaluations excluded."""
        return sum(float(row["seconds/total"]) for row in self.steps[: self.steps_to_target])


def is_reached(row: Mapping[str, Any]) -> bool:
    return bool(row["heldout/accuracy"] >= TARGET)


@pytest.mark.learning
def test_every_preset_reaches_the_target_on_all_seeds(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    presets, seeds = (["grpo"], 1) if request_of_tests().is_quick else (PRESETS, SEEDS)
    runs = {
        (preset, seed): learning_run(tmp_path / f"{preset}-{seed}", f"learner={preset}", f"seed={seed}")
        for preset in presets
        for seed in range(seeds)
    }
    show(runs)
    missed = {preset for (preset, _), run in runs.items() if run.steps_to_target is None}
    record_property("presets.reached", len(set(presets) - missed))
    record_property("presets.total", len(presets))
    record_property("presets.worst_accuracy", min(run.accuracies[-1] for run in runs.values()))
    assert missed == set()


@pytest.mark.learning
def test_a_learning_rate_of_zero_learns_nothing(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    run = learning_run(tmp_path / "control", "learner=grpo", "learner.learning_rate=0")
    record_property("presets.control_accuracy", run.accuracies[-1])
    assert run.steps_to_target is None


def test_only_steps_up_to_the_target_are_counted() -> None:
    looks = [{"step": 4 * place, "heldout/accuracy": one} for place, one in enumerate((0.3, 0.6, 0.9))]
    steps = [{"seconds/total": 0.5}] * 12
    run = Run(evaluations=looks, steps=steps)
    assert (run.steps_to_target, run.seconds) == (8, 4.0)
    assert Run(evaluations=looks[:2], steps=steps).steps_to_target is None


def show(runs: Mapping[tuple[str, int], Run]) -> None:
    header = ("preset", "seed", "before", "after", f"steps to {TARGET:.0%}", "seconds")
    rows = [
        (preset, seed, run.accuracies[0], run.accuracies[-1], run.steps_to_target or "not reached", run.seconds)
        for (preset, seed), run in runs.items()
    ]
    print_table("Learning arithmetic: nano model, held-out accuracy", [header, *rows])


def learning_run(run: Path, *overrides: str) -> Run:
    """Train until the target is reached, or to the end. Raises RuntimeError if the run fails."""
    log = run.with_suffix(".log")
    command = [
        *(sys.executable, "-m", "parallm.train", "+recipe=arithmetic_grpo", f"trainer.steps={STEPS}"),
        *("trainer.evaluate_every=4", "checkpoint.every=1000", "server=off", "metrics.display=off"),
        *(f"hydra.run.dir={run}", *overrides),
    ]
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=output, stderr=output) as process,
    ):
        while process.poll() is None and not any(map(is_reached, evaluations(run))):
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    if process.returncode not in (0, 130):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Run(evaluations=evaluations(run), steps=metrics(run))
