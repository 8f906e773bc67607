"""OpenAI's client, unmodified, hands in a batch and a reinforcement job, whose model answers the batch better.

The server is `python -m parallm.serve` with the embedded model. With a learning rate that moves nothing the same way
gains nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import foreign_environment, last_json, python_with, run_program, running

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.types import Split

PROGRAM = Path(__file__).parent / "programs" / "openai_jobs.py"
OPENAI = ("openai==3.54.0", "langchain-openai==1.7.3", "renderers==0.1.12", "atroposlib==0.4.0")
"""Those of `clients/test_clients.py`, with which it shares a place."""
SETTINGS = (
    "jobs.enabled=true",
    "jobs.training={learner: {learning_rate: 2e-3}, rollout: {max_tokens: 64}, checkpoint: {every: 10}}",
)
Record = Callable[[str, object], None]


def hand_in(folder: Path, **hyperparameters: Any) -> dict[str, Any]:
    environment = Arithmetic(ArithmeticSettings(num_train=512, num_test=128))
    files = {split: folder / f"{split}.jsonl" for split in ("train", "test")}
    for split in ("train", "test"):
        write(environment, split, files[split])
    python = python_with(request_of_tests().peers / "clients-openai", OPENAI)
    with running("parallm.serve", SETTINGS, folder) as server:
        words = [server.url, str(files["train"]), str(files["test"]), json.dumps(hyperparameters)]
        return last_json(run_program([python, str(PROGRAM), *words], foreign_environment(), folder))


def write(environment: Arithmetic, split: Split, file: Path) -> None:
    rows = [
        {
            "messages": [{"role": message.role, "content": message.content} for message in problem.messages],
            "reference_answer": int(problem.answer),
        }
        for problem in environment.problems(split)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.interop
def test_a_job_gains_accuracy_and_its_policy_answers(tmp_path: Path, record_property: Record) -> None:
    # 32 steps of 16 problems; the quickstart has 60
    given = {"n_epochs": 1, "batch_size": 512} if request_of_tests().is_quick else {"n_epochs": 1, "batch_size": 16}
    found = hand_in(tmp_path, **given, eval_interval=32)
    record_property("jobs.accuracy_before", found["before"])
    record_property("jobs.accuracy_gain", found["after"] - found["before"])
    record_property("remark", f"{found['version']}: {found['before']:.3f} to {found['after']:.3f} by {found['model']}")
    is_whole = found["jobs"] and found["results"] >= found["steps"][-1] and found["model"].startswith("ft:nano:sums:")
    record_property("models.clients_passed", int(is_whole))
    record_property("models.clients_total", 1)
    assert is_whole, found


@pytest.mark.interop
def test_a_job_that_moves_nothing_gains_nothing(tmp_path: Path, record_property: Record) -> None:
    found = hand_in(tmp_path, n_epochs=1, batch_size=256, learning_rate_multiplier=1e-6)
    record_property("jobs.control_gain", found["after"] - found["before"])
    assert found["after"] - found["before"] < 0.1
