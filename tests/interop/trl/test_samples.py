"""Completions sampled until 80% of the held-out problems are solved: ours against TRL's GRPOTrainer.

Same nano model, problems, seeds, prompts and completions a step, sampling, adapter, learning rates and Adam; each side
with its own learner. Ours is `python -m parallm.train +recipe=arithmetic_grpo` as it is; TRL runs on torch's CPU in an
environment of its own and reads its settings from the config.yaml of our run.

- Samples are all completions drawn in training: those of groups that refilling replaces, too. Both sides are evaluated
  greedily after each step on the same problems; the first evaluation that reaches the target counts.
- Order: TRL's own shuffling is off, and its data set is what our problem stream gives. Where we refill, problems come
  from the same stream, so that our step k is further along in it than TRL's.
- Seeds: the same numbers, but not the same random numbers: LoRA's A and the samples are drawn by MLX and by torch.
- Both divide advantages by the standard deviation of the group and average over all tokens.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from bench.measurement import request_of_tests
from bench.processes import NANO, clean_environment, evaluations, last_json, metrics, run_program, train

from tests.interop.trl.requirements import trl_python

TARGET = 0.8
PROGRAM = Path(__file__).parent / "programs" / "trl_samples.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. Entry k of `sampled` and `seconds` is step k + 1."""

    accuracies: Sequence[tuple[int, float]]
    """Step (0: before training) and held-out accuracy."""
    sampled: Sequence[int]
    seconds: Sequence[float]

    @property
    def samples_to_target(self) -> float:
        """Completions up to the first evaluation that reached the target; infinite if none did."""
        steps = next((step for step, accuracy in self.accuracies if accuracy >= TARGET), None)
        return math.inf if steps is None else sum(self.sampled[:steps])


@pytest.mark.interop
def test_we_need_no_more_samples_than_trl(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    request = request_of_tests()
    pairs = []
    for seed in range(request.size(3, 1)):
        ours, config = our_run(seed, request.size(24, 2), request.size(512, 64), tmp_path / str(seed))
        theirs = trl_run(config)
        pairs.append((ours, theirs))
        counts = " and ".join(f"{run.samples_to_target:.0f} samples, {sum(run.seconds):.0f} s" for run in pairs[-1])
        print(f"seed {seed}: {counts}", flush=True)
    ratio = median(samples_ratio(*pair) for pair in pairs)
    if math.isfinite(ratio):
        record_property("trl.samples_to_80_ratio", ratio)
    assert request.is_quick or ratio <= 1.5


def samples_ratio(ours: Run, theirs: Run) -> float:
    """Our samples over TRL's, or over all of TRL's where it does not arrive."""
    return ours.samples_to_target / min(theirs.samples_to_target, sum(theirs.sampled))


def our_run(seed: int, steps: int, problems: int, folder: Path) -> tuple[Run, Mapping[str, Any]]:
    """With the settings as the run wrote them down."""
    evaluation = ("trainer.evaluate_every=1", f"trainer.evaluate_problems={problems}", "checkpoint.every=1000")
    train(folder, "+recipe=arithmetic_grpo", f"seed={seed}", f"trainer.steps={steps}", *evaluation)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = metrics(folder)
    run = Run(
        accuracies=[(row["step"], row["heldout/accuracy"]) for row in evaluations(folder)],
        sampled=[row["groups/sampled"] * config["rollout"]["group_size"] for row in rows],
        seconds=[row["seconds/total"] for row in rows],
    )
    return run, config


def trl_run(config: Mapping[str, Any]) -> Run:
    """TRL with the settings of our run; it stops at the target."""
    job = json.dumps({"model": str(NANO), "target": TARGET, "config": config})
    environment = clean_environment() | {"HF_HUB_OFFLINE": "1"}
    return Run(**last_json(run_program([trl_python(), str(PROGRAM), job], environment)))


def test_a_side_that_does_not_arrive_counts_as_it_should() -> None:
    fast = Run(accuracies=[(0, 0.3), (1, 0.8)], sampled=[64, 64], seconds=[1.0, 1.0])
    never = Run(accuracies=[(0, 0.3), (1, 0.5)], sampled=[64, 64], seconds=[1.0, 1.0])
    assert samples_ratio(fast, never) == 0.5
    assert samples_ratio(never, fast) == math.inf
