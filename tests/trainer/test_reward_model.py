"""Whole runs: pairs make a reward model, which pays a policy on the same base."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import AdapterError, ConfigError
from parallm.model.adapters.adapter import REWARD_HEAD
from parallm.model.adapters.files import read_adapter

Train = Callable[..., int]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A bare number is preferred to a worked-out answer."""
    problems = Arithmetic(ArithmeticSettings(num_train=160, num_test=4)).problems("train")
    rows = [
        {
            "prompt": one.messages[0].content,
            "chosen": f"#### {one.answer}",
            "rejected": f"{one.answer} + 0 = {one.answer}\n#### {one.answer}",
        }
        for one in problems
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "pairs.jsonl")


def learner(data: str, **changes: Any) -> dict[str, Any]:
    return {"trains": "reward_model", "data": data, "learning_rate": 5e-3, "warmup_steps": 0} | changes


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name and name != "time"} for row in rows]


def test_pairs_make_a_reward_model_that_tells_held_out_pairs_apart_and_pays_a_policy(
    train: Train, data: str, tmp_path: Path
) -> None:
    trainer = {"steps": 8, "evaluate_problems": 512, "evaluate_every": 4}
    assert train(folder="rm", learner=learner(data), trainer=trainer, rollout={"problems_per_step": 12}) == 0
    rows, evaluations = rows_of(tmp_path / "rm"), rows_of(tmp_path / "rm", "evaluations.jsonl")
    assert rows[-1]["update/loss"] < 0.5 * rows[0]["update/loss"]
    assert [row["update/version"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not any(name.startswith(("reward", "groups", "parity", "offpolicy", "rollout")) for name in rows[0])
    assert [row["step"] for row in evaluations] == [0, 4, 8]
    assert evaluations[-1]["heldout/low"] > 0.6  # chance is 0.5
    assert evaluations[-1]["heldout/margin_low"] > 0
    assert evaluations[-1]["heldout/loss"] < 0.5 * evaluations[0]["heldout/loss"]
    reward_model = read_adapter(tmp_path / "rm" / "adapter")
    assert reward_model.version == 8
    assert REWARD_HEAD in reward_model.arrays
    settings = {"reward_model": {"adapter": str(tmp_path / "rm"), "weight": 0.5}}
    assert train(folder="rl", rollout=settings, trainer={"steps": 2, "evaluate_problems": 4}) == 0
    for row in rows_of(tmp_path / "rl"):
        expected = row["reward_part/even"] + 0.5 * row["reward_part/rollout/reward_model"]
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-5)
        assert row["parity/max_abs"] <= 1e-4
    assert "heldout_part/rollout/reward_model" in rows_of(tmp_path / "rl", "evaluations.jsonl")[0]


def test_a_reward_model_that_pays_a_policy_scores_for_clients_and_one_can_be_loaded_for_them_alone(
    train: Train, run_with_client: Train, data: str, tmp_path: Path
) -> None:
    assert train(folder="rm", learner=learner(data), trainer={"steps": 4}, rollout={"problems_per_step": 12}) == 0
    pair = json.loads(Path(data).read_text().splitlines()[0])

    def act(client: httpx.Client) -> None:
        messages = [{"role": "user", "content": pair["prompt"]}]
        body = {"messages": messages, "completions": [pair["chosen"], pair["rejected"]]}
        answer = client.post("/v1/rewards/score", json=body | {"model": "reward"}).raise_for_status().json()
        chosen, rejected = (one["score"] for one in answer["data"])
        assert chosen > rejected
        whole = [*messages, {"role": "assistant", "content": pair["chosen"]}]
        alone = client.post("/v1/rewards/score", json={"model": "reward", "messages": whole}).json()
        assert alone["data"][0]["score"] == pytest.approx(chosen, abs=1e-4)

    assert run_with_client(act, rollout={"reward_model": {"adapter": str(tmp_path / "rm")}}) == 0
    assert run_with_client(act, server={"reward_model": str(tmp_path / "rm")}) == 0


@pytest.mark.parametrize("key", ["reward_model", "generation_config"])
def test_folders_of_the_server_are_found_before_the_model_is_loaded(train: Train, tmp_path: Path, key: str) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (broken / name).write_text("{}")  # cannot be loaded
    with pytest.raises(ConfigError, match=rf"^server\.{key}.*none"):
        train(model={"path": str(broken)}, server={"enabled": True, "port": 0, key: str(tmp_path / "none")})


class Unpaid(Arithmetic):
    """Says which answers are right, and pays nothing for them."""

    weights: Mapping[str, float] = {}


def pairs_of(samples: Path) -> list[dict[str, str]]:
    """Of each problem's completions that ended by themselves, up to two right ones with up to three wrong ones."""
    texts: dict[tuple[str, bool], list[str]] = {}
    for row in rows_of(samples, "samples.jsonl"):
        known = texts.setdefault((row["prompt"], row["parts"]["correct"] == 1), [])
        if row["finish_reason"] == "stop" and row["completion"] not in known:
            known.append(row["completion"])
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in dict.fromkeys(prompt for prompt, _ in texts)
        for chosen in texts.get((prompt, True), [])[:2]
        for rejected in texts.get((prompt, False), [])[:3]
    ]


@pytest.mark.slow
def test_a_policy_learns_arithmetic_from_a_reward_model_alone(train: Train, tmp_path: Path) -> None:
    unpaid = Unpaid(ArithmeticSettings(num_test=128))
    model, rates = {"lora": {"rank": 16}}, {"learning_rate": 2e-3, "warmup_steps": 5}
    sampling = {"problems_per_step": 48, "group_size": 8, "max_tokens": 64, "temperature": 1.0, "refill_rounds": 0}
    metrics, short = {"samples_per_step": 1000}, {"steps": 8}
    train(unpaid, "samples", rollout=sampling, trainer=short, metrics=metrics, learner={"learning_rate": 0.0})
    lines = [json.dumps(pair) + "\n" for pair in pairs_of(tmp_path / "samples")]
    (tmp_path / "own.jsonl").write_text("".join(lines))
    reward_model = learner(str(tmp_path / "own.jsonl"), **rates)
    evaluated = {"steps": 20, "evaluate_problems": 128}
    train(unpaid, "rm", learner=reward_model, model=model, rollout={"problems_per_step": 16}, trainer=evaluated)
    assert rows_of(tmp_path / "rm", "evaluations.jsonl")[-1]["heldout/low"] > 0.6
    paid = sampling | {"problems_per_step": 16, "reward_model": {"adapter": str(tmp_path / "rm")}}
    train(unpaid, "rl", rollout=paid, trainer={"steps": 12, "evaluate_problems": 128}, model=model, learner=rates)
    before, after = rows_of(tmp_path / "rl", "evaluations.jsonl")
    name = "heldout_part/rollout/reward_model"
    assert after[f"{name}_low"] > before[f"{name}_high"]
    assert after["heldout/low"] > before["heldout/high"]


def test_a_resumed_run_is_the_same_run(train: Train, data: str, tmp_path: Path) -> None:
    parts = {"learner": learner(data), "rollout": {"problems_per_step": 5}, "model": {"lora": {"dropout": 0.1}}}
    train(folder="whole", trainer={"steps": 4}, **parts)
    train(folder="parts", trainer={"steps": 2}, **parts)
    train(folder="parts", trainer={"steps": 4}, checkpoint={"resume": "auto"}, **parts)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    hashes = {read_adapter(tmp_path / folder / "adapter").digest for folder in ("whole", "parts")}
    assert len(hashes) == 1


def test_a_reward_model_goes_on_from_a_policy_or_from_itself(train: Train, data: str, tmp_path: Path) -> None:
    train(folder="policy", trainer={"steps": 1})
    policy, one = str(tmp_path / "policy" / "adapter"), {"steps": 1, "evaluate_problems": 8}
    train(folder="first", learner=learner(data), model={"adapter": policy, "lora": {"rank": 4}}, trainer=one)
    first = read_adapter(tmp_path / "first" / "adapter")
    assert (first.version, first.parent) == (1, 0)
    again = {"adapter": str(tmp_path / "first" / "adapter"), "lora": {"rank": 4}}
    train(folder="second", learner=learner(data), model=again, trainer=one)
    second = read_adapter(tmp_path / "second" / "adapter")
    assert (second.version, second.parent) == (2, 1)
    accuracies = [rows_of(tmp_path / name, "evaluations.jsonl") for name in ("first", "second")]
    assert accuracies[0][1]["heldout/margin"] == pytest.approx(accuracies[1][0]["heldout/margin"], rel=1e-5)


def test_a_reward_model_writes_no_text(train: Train, data: str, tmp_path: Path) -> None:
    train(folder="rm", learner=learner(data), trainer={"steps": 1})
    model = {"adapter": str(find_adapter(str(tmp_path / "rm"))), "lora": {"rank": 4}}
    with pytest.raises(AdapterError, match="is a reward model: it scores completions and writes none"):
        train(folder="rl", model=model)


def test_what_is_no_reward_model_is_refused_as_one(train: Train, tmp_path: Path) -> None:
    train(folder="policy", trainer={"steps": 1})
    with pytest.raises(AdapterError, match="is no reward model"):
        train(folder="rl", rollout={"reward_model": {"adapter": str(tmp_path / "policy")}})
    with pytest.raises(AdapterError, match="nothing is neither an adapter, a checkpoint nor a run"):
        train(folder="rl", rollout={"reward_model": {"adapter": "/nothing"}}, model={"path": "nobody/nothing"})


def test_a_run_without_data_is_refused_before_the_model_loads(train: Train) -> None:
    with pytest.raises(ConfigError, match=r"learner\.data: must be given"):
        train(learner={"trains": "reward_model"}, model={"path": "nobody/nothing"})


def test_a_policy_and_a_reward_model_train_at_the_same_time(train: Train, data: str, tmp_path: Path) -> None:
    policies = {"poet": {}, "critic": {"learner": learner(data), "trainer": {"evaluate_problems": 8}}}
    assert train(trainer={"steps": 2}, policies=policies) == 0
    assert REWARD_HEAD in read_adapter(tmp_path / "run" / "critic" / "adapter").arrays
    assert REWARD_HEAD not in read_adapter(tmp_path / "run" / "poet" / "adapter").arrays
    assert [row["step"] for row in rows_of(tmp_path / "run" / "critic", "evaluations.jsonl")] == [0, 2]
