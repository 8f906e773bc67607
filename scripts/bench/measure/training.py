"""Whole training runs as a newcomer starts them: the quickstart, and GSM8K with a model."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.compare import change_by_halves
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import ROOT, SCRIPTS, clean_environment, metrics

SEEDS = (0, 1, 2)
QUICK = ("trainer.steps=2", "trainer.evaluate_problems=64")


@measurement(
    {
        "quickstart.accuracy_before": Bar(max=0.45),
        "quickstart.accuracy_after": Bar(min=0.85),
        "quickstart.train_seconds": Bar(max=480),
        "quickstart.control_change": Bar(min=-0.05, max=0.05),
        "quickstart.control_reward_change": Bar(min=-0.06, max=0.06),
    },
    minutes=7,
)
def quickstart(request: Request) -> Figures:
    """The worst of three seeds; and what changes in a run that does not learn: greedy answers, sampled rewards."""
    command, more = [str(SCRIPTS / "quickstart")], QUICK if request.is_quick else ()
    runs = [trained(command, [f"seed={seed}", *more], "quickstart") for seed in SEEDS]
    control, rewards = trained(command, ["seed=0", "learner.learning_rate=0", *more], "quickstart")
    by_chance = change_by_halves(rewards)
    print(f"  learning rate 0: reward of the second half of the steps over that of the first {by_chance.text()}")
    return {
        "quickstart.accuracy_before": max(figures["quickstart.accuracy_before"] for figures, _ in runs),
        "quickstart.accuracy_after": min(figures["quickstart.accuracy_after"] for figures, _ in runs),
        "quickstart.train_seconds": max(figures["quickstart.train_seconds"] for figures, _ in runs),
        "quickstart.control_change": control["quickstart.accuracy_after"] - control["quickstart.accuracy_before"],
        "quickstart.control_reward_change": by_chance.gain,
    }


@measurement(
    {
        "gsm8k.peak_memory_gb": Bar(max=4.295, needs="model"),
        "gsm8k.accuracy_before": Bar(),
        "gsm8k.accuracy_after": Bar(),
        "gsm8k.reward_first": Bar(),
        "gsm8k.reward_last": Bar(min=0.5, needs="model"),
        "gsm8k.reward_rise": Bar(min=0.2, needs="model"),
    },
    minutes=12,
    needs="model",
)
def gsm8k(request: Request) -> Figures:
    """16 problems, 12 steps."""
    overrides = [f"model.path={request.model}", f"environment.path={request.data}", "environment.limit=16"]
    more = QUICK if request.is_quick else ("trainer.steps=12",)
    command = [sys.executable, "-m", "parallm.train", "+recipe=gsm8k_grpo"]
    figures, _ = trained(command, [*overrides, "learner.learning_rate=5e-4", *more], "gsm8k")
    return figures | {"gsm8k.reward_rise": figures["gsm8k.reward_last"] - figures["gsm8k.reward_first"]}


def trained(command: Sequence[str], overrides: Sequence[str], prefix: str) -> tuple[dict[str, float], list[float]]:
    """The figures of a run and the mean reward of each step. Raises subprocess.CalledProcessError if it fails."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        own = [f"metrics.figures={prefix}", "metrics.display=lines", "server.port=0", f"hydra.run.dir={run}"]
        subprocess.run([*command, *overrides, *own], env=clean_environment(), cwd=ROOT, check=True)
        figures = json.loads((run / "summary.json").read_text())["figures"]
        return figures, [row["reward/mean"] for row in metrics(run)]
