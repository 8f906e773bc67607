"""The completions that a run keeps for people: what is in their files, and that keeping them changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.rollout_format import LEARNED, TRAINED

Train = Callable[..., int]


def digest_of(folder: Path) -> str:
    state = CheckpointManager(folder, CheckpointSettings()).load("auto")
    assert state is not None
    return state.adapter.digest


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name and name != "time"} for row in rows]


def test_a_run_keeps_its_completions_with_the_numbers_of_their_tokens(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 3, "evaluate_problems": 4}, learner={"learning_rate": 1e-3})
    folder = RolloutFolder(tmp_path / "run" / "rollouts")
    rows = numbers_of(tmp_path / "run")
    listing = folder.listing()
    assert [row["step"] for row in listing.steps] == [1, 2, 3]
    assert [row["with_signal"] for row in listing.steps] == [row["groups/with_signal"] for row in rows]
    entropies, samples = (
        [],
        [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()],
    )
    file = folder.read(3)
    for place, group in enumerate(file.groups):
        for index, completion in enumerate(group["completions"]):
            tokens = file.tokens(place, index)
            assert "".join(tokens.texts) == completion["shown"]
            assert completion["shown"].startswith(completion["text"])
            assert completion["versions"][-1][2] == len(tokens.ids_T)
            if tokens.entropies_T is not None:
                assert completion["advantage"] is not None
                entropies.append(tokens.entropies_T[(tokens.flags_T & TRAINED) > 0].astype(np.float32))
            else:
                assert not (tokens.flags_T & LEARNED).any()
    texts = [row["text"] for group in file.groups for row in group["completions"]]
    assert sorted(texts) == sorted(row["completion"] for row in samples if row["step"] == 3)
    assert np.concatenate(entropies).mean() == pytest.approx(rows[2]["update/entropy"], rel=1e-2)


def test_keeping_completions_changes_no_bit_of_a_run(train: Train, tmp_path: Path) -> None:
    for amount in ("off", "some", "all"):
        train(folder=amount, metrics={"rollouts": amount}, trainer={"steps": 3})
    assert digest_of(tmp_path / "off") == digest_of(tmp_path / "some") == digest_of(tmp_path / "all")
    assert numbers_of(tmp_path / "off") == numbers_of(tmp_path / "some") == numbers_of(tmp_path / "all")
    assert not (tmp_path / "off" / "rollouts").exists()
    train(folder="other", trainer={"steps": 3}, learner={"learning_rate": 1.01e-3})
    assert digest_of(tmp_path / "other") != digest_of(tmp_path / "off")


def test_some_keeps_few_groups_and_first_those_that_were_trained_on(train: Train, tmp_path: Path) -> None:
    train(metrics={"rollouts": "some"}, rollout={"problems_per_step": 7}, trainer={"steps": 1})
    file = RolloutFolder(tmp_path / "run" / "rollouts").read(1)
    trained = [group["completions"][0]["advantage"] is not None for group in file.groups]
    assert (len(trained), trained) == (4, sorted(trained, reverse=True))


def test_a_resumed_run_keeps_each_step_once(train: Train, tmp_path: Path) -> None:
    train(trainer={"steps": 3}, checkpoint={"every": 2})
    folder = tmp_path / "run" / "rollouts"
    times = {row["step"]: row["time"] for row in RolloutFolder(folder).listing().steps}
    (folder / "step_000007.safetensors").write_bytes((folder / "step_000003.safetensors").read_bytes())
    train(trainer={"steps": 4}, checkpoint={"resume": "auto"})
    steps = RolloutFolder(folder).listing().steps
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {row["step"]: row["time"] for row in steps[:3]} == times
