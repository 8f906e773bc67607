"""Replayed steps of a divided model give the tokens and log-probs of launched ones, with both ranks on one GPU."""

import json
from pathlib import Path

import pytest

from parallm.model.kernels.cuda import has_kernels
from tests.distributed.conftest import run_ranks

LIMIT_SECONDS = 200


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
def test_replayed_steps_of_two_ranks_give_what_launched_ones_give(tmp_path: Path) -> None:
    output = tmp_path / "sampled.json"
    run_ranks(tmp_path, "tests.distributed.rank_steps", str(output), limit_seconds=LIMIT_SECONDS)
    found = json.loads(output.read_text())
    for kind in ("dense", "4bit"):
        launched, replayed = found[f"{kind} launched"], found[f"{kind} replayed"]
        assert (launched["replayed"], replayed["launched"]) == (0, 0)
        assert replayed["replayed"] > 50
        assert launched["sampled"] == replayed["sampled"]
