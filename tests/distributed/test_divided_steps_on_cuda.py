"""Replayed steps of a divided model give the tokens and log-probs of launched ones, with both ranks on one GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallm.model.kernels.cuda import has_kernels
from tests.distributed.conftest import ring

LIMIT_SECONDS = 200


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
def test_replayed_steps_of_two_ranks_give_what_launched_ones_give(tmp_path: Path) -> None:
    output = tmp_path / "sampled.json"
    command = [sys.executable, "-m", "tests.distributed.rank_steps", str(output)]
    ranks = [subprocess.Popen(command, env=environment) for environment in ring(tmp_path, 2)]
    try:
        assert [rank.wait(LIMIT_SECONDS) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = json.loads(output.read_text())
    for kind in ("dense", "4bit"):
        launched, replayed = found[f"{kind} launched"], found[f"{kind} replayed"]
        assert (launched["replayed"], replayed["launched"]) == (0, 0)
        assert replayed["replayed"] > 50
        assert launched["sampled"] == replayed["sampled"]
