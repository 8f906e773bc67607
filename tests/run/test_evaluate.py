"""`parallm.evaluate`: the nano model and adapters of it on a few arithmetic problems."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pydantic import TypeAdapter

from parallm.config.schema import EvaluateConfig
from parallm.device.blas import load_blas
from parallm.errors import AdapterError, ConfigError
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.reward_head import with_reward_head
from parallm.model.shared_model import SharedModel
from parallm.run.evaluate import run_evaluation

ROOT = Path(__file__).parents[2]
TINY: dict[str, dict[str, Any]] = {
    "environment": {"name": "arithmetic", "num_train": 8, "num_test": 16},
    "rollout": {"max_tokens": 48},
}
Evaluate = Callable[..., dict[str, Any]]


def write_adapter(model: SharedModel, folder: Path, *, version: int, rank: int, size_of_b: float) -> None:
    """An adapter whose product is random; large ones leave no sense in what the model says."""
    arrays = initial_arrays(model.targets, rank, mx.random.key(version))
    for name in [name for name in arrays if name.endswith("lora_b")]:
        arrays[name] = size_of_b * mx.random.normal(arrays[name].shape, key=mx.random.key(len(name)))
    adapter = make_adapter(arrays, version=version, step=10 * version, rank=rank, alpha=2.0 * rank)
    if version % 2:
        write_mlx(adapter, folder, num_layers=model.num_layers)
    else:
        write_peft(adapter, folder, "nano", model_type="llama")


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    """The report of an evaluation as the command makes it, with settings added to tiny ones."""

    def run(**parts: Any) -> dict[str, Any]:
        values = {key: {**TINY[key], **parts[key]} if key in TINY and key in parts else parts.get(key) for key in parts}
        config = TypeAdapter(EvaluateConfig).validate_python({**TINY, **values})
        assert run_evaluation(config, tmp_path, load_blas(config.device)) == 0
        report: dict[str, Any] = json.loads((tmp_path / "evaluation.json").read_text())
        return report

    return run


def test_the_base_alone_is_evaluated_without_any_adapter(evaluate: Evaluate) -> None:
    (base,) = evaluate()["models"]
    assert (base["name"], base["version"], base["num_problems"], base["difference"]) == ("base", 0, 16, None)
    assert 0 < base["accuracy"] < 1
    assert base["low"] < base["accuracy"] < base["high"]


def test_adapters_of_any_rank_and_format_stand_beside_the_base(
    evaluate: Evaluate, nano: SharedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(nano, tmp_path / "noise", version=3, rank=4, size_of_b=1.0)
    write_adapter(nano, tmp_path / "nothing", version=6, rank=2, size_of_b=0.0)
    noise, nothing = str(tmp_path / "noise"), str(tmp_path / "nothing")
    base, ruined, unchanged = evaluate(model={"adapter": noise}, adapters=[nothing])["models"]
    assert (ruined["name"], ruined["version"], ruined["step"], ruined["accuracy"]) == (noise, 3, 30, 0.0)
    assert ruined["difference"]["mean"] == -base["accuracy"]
    assert (unchanged["name"], unchanged["version"], unchanged["accuracy"]) == (nothing, 6, base["accuracy"])
    assert unchanged["difference"]["mean"] == 0.0
    assert unchanged["difference"]["low"] < -0.1
    assert unchanged["difference"]["high"] > 0.1
    table = capsys.readouterr().out
    assert all(text in table for text in ("greedy accuracy", "points above base", f"-{100 * base['accuracy']:.1f}"))
    assert f"noise@3: {noise}\n" in table
    assert table.count(noise) == 1
    assert max(map(len, table.partition("held-out problems")[2].partition("report:")[0].splitlines())) <= 80


def test_the_base_can_be_left_out(evaluate: Evaluate, nano: SharedModel, tmp_path: Path) -> None:
    write_adapter(nano, tmp_path / "a", version=1, rank=2, size_of_b=0.0)
    assert [one["version"] for one in evaluate(base=False, adapters=[str(tmp_path / "a")])["models"]] == [1]


def test_samples_give_pass_at_k_that_rises_with_k(evaluate: Evaluate, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = {"evaluate_samples": 4, "evaluate_k": [1, 2, 4], "evaluate_problems": 8}
    (base,) = evaluate(trainer=trainer)["models"]
    means = [base["pass_at"][k]["mean"] for k in ("1", "2", "4")]
    assert means == sorted(means)
    assert 0 < means[0] < means[2]
    table = capsys.readouterr().out
    assert "4 at temperature 1.00" in table
    assert "pass@2" in table


def test_every_completion_is_kept_with_its_score(evaluate: Evaluate, tmp_path: Path) -> None:
    (base,) = evaluate(trainer={"evaluate_samples": 2, "evaluate_problems": 4})["models"]
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [(row["model"], row["sample"]) for row in rows] == [("base", None)] * 4 + [("base", 0), ("base", 1)] * 4
    assert sum(row["is_correct"] for row in rows[:4]) / 4 == base["accuracy"]
    assert all(row["prompt"] and row["completion"] and row["answer"] for row in rows)


def test_a_long_evaluation_says_how_far_it_is(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.metrics.eta.SECONDS_BETWEEN", 0.0)
    evaluate(trainer={"evaluate_samples": 2})
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith("of 48 completions")]
    assert said == [f"base: {done} of 48 completions" for done in range(1, 48)]


def test_an_adapter_of_another_program_has_no_version(
    evaluate: Evaluate, nano: SharedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(nano, tmp_path / "foreign", version=0, rank=2, size_of_b=0.0)
    evaluate(adapters=[str(tmp_path / "foreign")], trainer={"evaluate_problems": 4})
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version")]
    assert row.split() == ["version", "base", "-"]


def test_the_same_evaluation_again_has_the_same_numbers(evaluate: Evaluate) -> None:
    trainer = {"evaluate_samples": 2, "evaluate_problems": 4}
    first, second = (evaluate(trainer=trainer)["models"][0] for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_nothing_to_evaluate_is_refused(evaluate: Evaluate) -> None:
    with pytest.raises(
        ConfigError, match=r"base=false leaves nothing to evaluate; name an adapter with model\.adapter"
    ):
        evaluate(base=False)
    with pytest.raises(ConfigError, match=r"trainer\.evaluate_problems=0 leaves nothing"):
        evaluate(trainer={"evaluate_problems": 0})


def test_an_adapter_of_another_base_is_refused(
    evaluate: Evaluate, load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    write_adapter(load_tiny("llama"), tmp_path / "other", version=1, rank=2, size_of_b=0.0)
    with pytest.raises(AdapterError, match="does not fit this base"):
        evaluate(adapters=[str(tmp_path / "other")])


def test_the_command_prints_a_table_and_leaves_a_report(tmp_path: Path) -> None:
    arguments = ["trainer.evaluate_problems=4", "rollout.max_tokens=24"]
    result = subprocess.run(
        [sys.executable, "-m", "parallm.evaluate", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "checkpoints" / "evaluate").iterdir()
    assert f"report: {(folder / 'evaluation.json').relative_to(tmp_path)}" in result.stdout
    assert {path.name for path in folder.iterdir()} == {"evaluation.json", "completions.jsonl"}
    assert "greedy accuracy" in result.stdout


def test_a_reward_model_is_refused(evaluate: Evaluate, nano: SharedModel, tmp_path: Path) -> None:
    policy = make_adapter(initial_arrays(nano.targets, 2, mx.random.key(1)), version=1, rank=2, alpha=4.0)
    write_peft(with_reward_head(policy, nano, 0), tmp_path / "trained", "nano", model_type="llama")
    with pytest.raises(AdapterError, match="is a reward model: it scores completions and writes none"):
        evaluate(model={"adapter": str(tmp_path / "trained")})
