"""Does a policy learn from a reward model alone, and for how long? The embedded model, word problems, three runs.

One samples from the base, so that right and wrong answers to the same problem make pairs. One trains a reward model on
these. One trains a policy that this reward model alone pays; whether its answers are right is only looked at.
A control does the last two with pairs turned round by a coin: that reward model must know nothing, and its policy must
not get better.
"""

import json
import random
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from job import SCRIPTS, clean_environment, run_program
from report import print_figures, print_table

from parallm.metrics.json_lines import read_rows

MOST_CHOSEN, MOST_REJECTED = 2, 3
"""Of a problem."""
RUN = (
    "environment=custom",
    "environment.target=unpaid:Unpaid",
    "rollout.group_size=8",
    "rollout.max_tokens=64",
    "rollout.refill_rounds=0",
    "server=off",
    "metrics.display=off",
    "checkpoint.every=1000",
)
SCORE = "heldout_part/rollout/reward_model"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    reward_model: Rows
    """Evaluations."""
    policy: Rows

    @property
    def pair_accuracy(self) -> float:
        return float(self.reward_model[-1]["heldout/accuracy"])

    @property
    def accuracies(self) -> list[float]:
        return [float(row["heldout/accuracy"]) for row in self.policy]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8, help="steps that sample, of 48 problems (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of the policy, looked at thrice (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        pairs = sampled_pairs(folder / "samples", arguments.samples, arguments.seed)
        learned = outcome(folder / "learned", pairs, arguments.steps, arguments.seed)
        control = outcome(folder / "control", turned(pairs), arguments.steps, arguments.seed)
    print(f"{len(pairs)} pairs, {learned.reward_model[-1]['heldout/problems']} of them held out")
    rows = [("", "pairs told apart", "right answers after steps", "mean score")]
    rows += [row("learned", learned), row("pairs turned round", control)]
    print_table("A policy paid by a reward model alone", rows)
    print_figures(
        {
            "reward_model.pairs": float(len(pairs)),
            "reward_model.pair_accuracy": learned.pair_accuracy,
            "reward_model.accuracy_before": learned.accuracies[0],
            "reward_model.accuracy_best": max(learned.accuracies),
            "reward_model.accuracy_last": learned.accuracies[-1],
            "reward_model.control_pair_accuracy": control.pair_accuracy,
            "reward_model.control_gain": max(control.accuracies) - control.accuracies[0],
        }
    )


def row(name: str, found: Outcome) -> tuple[str, ...]:
    last = found.reward_model[-1]
    told = f"{last['heldout/accuracy']:.1%} ({last['heldout/low']:.0%} to {last['heldout/high']:.0%})"
    right = "  ".join(f"{one['step']}: {one['heldout/accuracy']:.1%}" for one in found.policy)
    return name, told, right, "  ".join(f"{one[SCORE]:.2f}" for one in found.policy)


def sampled_pairs(run: Path, steps: int, seed: int) -> list[dict[str, str]]:
    """Of each problem's completions that ended by themselves, some right ones, each with some wrong ones."""
    settings = ("learner.learning_rate=0", "metrics.samples_per_step=1000", "trainer.evaluate_problems=0")
    train(run, *settings, f"trainer.steps={steps}", "rollout.problems_per_step=48", f"seed={seed}")
    texts: dict[tuple[str, bool], list[str]] = {}
    for sample in read_rows(run / "samples.jsonl"):
        known = texts.setdefault((sample["prompt"], sample["parts"]["correct"] == 1), [])
        if sample["finish_reason"] == "stop" and sample["completion"] not in known:
            known.append(sample["completion"])
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in dict.fromkeys(prompt for prompt, _ in texts)
        for chosen in texts.get((prompt, True), [])[:MOST_CHOSEN]
        for rejected in texts.get((prompt, False), [])[:MOST_REJECTED]
    ]


def turned(pairs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    coin = random.Random(0)
    both = ("chosen", "rejected")
    return [
        {"prompt": pair["prompt"]} | dict(zip(both, coin.sample([pair[name] for name in both], 2), strict=True))
        for pair in pairs
    ]


def outcome(folder: Path, pairs: Sequence[Mapping[str, str]], steps: int, seed: int) -> Outcome:
    folder.mkdir()
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    learned = ("learner.learning_rate=2e-3", "rollout.problems_per_step=16", f"seed={seed}")
    model, policy = folder / "reward_model", folder / "policy"
    train(model, "learner=reward_model", f"learner.data={data}", "trainer.steps=20", *learned)
    looks = ("trainer.evaluate_problems=256", f"trainer.evaluate_every={max(1, steps // 3)}")
    paid = f"rollout.reward_model.adapter={model}"
    train(policy, paid, *looks, f"trainer.steps={steps}", *learned)
    return Outcome(
        reward_model=read_rows(model / "evaluations.jsonl"),
        policy=read_rows(policy / "evaluations.jsonl"),
    )


def train(run: Path, *settings: str) -> None:
    """Raises RuntimeError with the last words of a run that fails."""
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{SCRIPTS}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "parallm.train", "name=check", *RUN, *settings, f"hydra.run.dir={run}"]
    run_program(command, environment, run.parent)


if __name__ == "__main__":
    main()
