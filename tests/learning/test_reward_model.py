"""A policy learns from a reward model alone, and not from one of pairs that a coin has turned round.

The embedded model, word problems. Right and wrong answers of the base to the same problem make pairs, a reward model
learns from these, and it alone pays a policy; whether the policy's answers are right is only looked at. The reward
model of the control must know nothing, and its policy must not get better.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from bench.measurement import request_of_tests
from bench.processes import evaluations, train

from parallm.metrics.json_lines import read_rows

MAX_CHOSEN, MAX_REJECTED = 2, 3
"""Completions of a problem."""
PAID = (
    *("environment=custom", "environment.target=bench.problems:Unpaid", "rollout.group_size=8"),
    *("rollout.max_tokens=64", "rollout.refill_rounds=0", "checkpoint.every=1000", "seed=0"),
)
LEARNING = ("learner.learning_rate=2e-3", "rollout.problems_per_step=16")


@pytest.mark.learning
def test_a_policy_learns_from_a_reward_model_alone(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    request = request_of_tests()
    steps = request.size(30, 3)
    pairs = sampled_pairs(tmp_path / "samples", request.size(8, 3))
    told, accuracies = paid_policy(tmp_path / "learned", pairs, steps)
    control_told, control = paid_policy(tmp_path / "control", turned(pairs), steps)
    record_property("reward_model.pair_accuracy", told)
    record_property("reward_model.accuracy_before", accuracies[0])
    record_property("reward_model.accuracy_best", max(accuracies))
    record_property("reward_model.accuracy_last", accuracies[-1])
    record_property("reward_model.control_pair_accuracy", control_told)
    record_property("reward_model.control_gain", max(control) - control[0])
    record_property("remark", f"{len(pairs)} pairs; right answers {accuracies}, of the control {control}")
    assert request.is_quick or max(accuracies) - accuracies[0] > max(control) - control[0]


def sampled_pairs(run: Path, steps: int) -> list[dict[str, str]]:
    """Some right completions of each problem, each with some wrong ones, among those that ended by themselves."""
    settings = ("learner.learning_rate=0", "metrics.samples_per_step=1000", "trainer.evaluate_problems=0")
    train(run, *PAID, *settings, f"trainer.steps={steps}", "rollout.problems_per_step=48")
    texts: dict[tuple[str, bool], list[str]] = {}
    for sample in read_rows(run / "samples.jsonl"):
        own = texts.setdefault((sample["prompt"], sample["parts"]["correct"] == 1), [])
        if sample["finish_reason"] == "stop" and sample["completion"] not in own:
            own.append(sample["completion"])
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in dict.fromkeys(prompt for prompt, _ in texts)
        for chosen in texts.get((prompt, True), [])[:MAX_CHOSEN]
        for rejected in texts.get((prompt, False), [])[:MAX_REJECTED]
    ]


def turned(pairs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    coin, both = random.Random(0), ("chosen", "rejected")
    return [
        {"prompt": pair["prompt"]} | dict(zip(both, coin.sample([pair[name] for name in both], 2), strict=True))
        for pair in pairs
    ]


def paid_policy(folder: Path, pairs: Sequence[Mapping[str, str]], steps: int) -> tuple[float, list[float]]:
    """The share of held-out pairs that the reward model tells apart, and the accuracies of its policy."""
    folder.mkdir()
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    model, policy = folder / "reward_model", folder / "policy"
    train(model, *PAID, "learner=reward_model", f"learner.data={data}", "trainer.steps=20", *LEARNING)
    looks = ("trainer.evaluate_problems=256", f"trainer.evaluate_every={max(1, steps // 3)}")
    train(policy, *PAID, f"rollout.reward_model.adapter={model}", *looks, f"trainer.steps={steps}", *LEARNING)
    told = float(evaluations(model)[-1]["heldout/accuracy"])
    return told, [float(row["heldout/accuracy"]) for row in evaluations(policy)]
