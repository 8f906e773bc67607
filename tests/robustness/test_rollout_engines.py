"""Three servers that come and go at random while a trainer samples with them: every step is that of an undisturbed run.

Steps and numbers are compared with those of a run that samples by itself; a token of another version would change the
gradient, and so all later steps. The controls: a server that computes with an old version and claims the new one, which
the trainer must find out and a trainer that believes it must be seen to go wrong by; and a server with another base.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import mlx.core as mx
import pytest
from bench.measurement import request_of_tests
from bench.processes import NANO

from tests.distributed.rollout_servers import Churn, Trainer, differing_steps, quiet_end, server

STEPS = 60
PAUSE = (0.5, 8.0)
PROGRAMS = Path(__file__).parent / "programs"
Record = Callable[[str, object], None]


@pytest.mark.robustness
def test_servers_that_come_and_go_cost_no_step_and_no_wrong_token(tmp_path: Path, record_property: Record) -> None:
    seconds, steps = request_of_tests().size(600, 60), request_of_tests().size(STEPS, 20)
    keys = (f"trainer.steps={steps}",)
    whole = Trainer(tmp_path / "whole", *keys).finish()
    servers = [server(tmp_path / f"server_{number}") for number in range(3)]
    source = random.Random(0)
    num_steps = num_lost = num_wrong = num_resampled = 0
    try:
        for one in servers:
            one.spawn()
        for one in servers:
            one.wait()
        urls = [one.url for one in servers]
        calm = Trainer(tmp_path / "calm", *keys, urls=urls).finish()
        began, runs = time.monotonic(), []
        churn = Churn(servers, source, pause=PAUSE)
        try:
            for number in count():
                if number and time.monotonic() - began > seconds:
                    break
                runs.append(Trainer(tmp_path / f"run_{number}", *keys, urls=urls))
                rows = runs[-1].finish()
                wrong = differing_steps(rows, whole)
                missing = {row["step"] for row in whole} - {row["step"] for row in rows}
                num_steps, num_lost = num_steps + len(rows), num_lost + len(missing)
                num_wrong += sum(row["update/tokens"] or 0 for row in rows if row["step"] in wrong)
                num_resampled += sum(
                    value for row in rows for name, value in row.items() if name.endswith("/lost_requests")
                )
        finally:
            churn.stop()
            for run in runs:
                run.stop()
    finally:
        quiet_end(servers)
    record_property("replicas.minutes", (time.monotonic() - began) / 60)
    record_property("replicas.kills", churn.num_kills)
    record_property("replicas.steps", num_steps)
    record_property("replicas.requests_sampled_again", num_resampled)
    record_property("replicas.steps_lost", num_lost)
    record_property("replicas.wrong_version_tokens", num_wrong)
    seconds_of = [median(row["seconds/rollout"] for row in rows[1:]) for rows in (whole, calm)]
    record_property("replicas.cpu_sampling_speedup", seconds_of[0] / seconds_of[1])
    assert differing_steps(calm, whole) == []
    assert (num_lost, num_wrong) == (0, 0)
    assert churn.num_kills


@pytest.mark.robustness
def test_a_server_that_claims_a_version_it_does_not_compute_with_is_found(
    tmp_path: Path, record_property: Record
) -> None:
    keys = ("trainer.steps=4",)
    liar = server(tmp_path / "liar", str(PROGRAMS / "stale_server.py"))
    liar.spawn()
    try:
        whole = Trainer(tmp_path / "whole", *keys).finish()
        liar.wait()
        run = Trainer(tmp_path / "run", *keys, urls=["local", liar.url])
        rows = run.finish()
        is_found = f"{liar.url} claims to have sampled with policy@2: its log-probs are those of policy@1" in run.log()
        trusting = Trainer(
            tmp_path / "trusting", *keys, urls=["local", liar.url], program=str(PROGRAMS / "trusting_trainer.py")
        )
        misled = trusting.finish()
    finally:
        quiet_end([liar])
    record_property("replicas.control_stale_found", int(is_found))
    record_property("replicas.control_misled_steps", len(differing_steps(misled, whole)))
    assert is_found, run.log()
    assert differing_steps(rows, whole) == []
    assert differing_steps(misled, whole)


@pytest.mark.robustness
def test_a_server_with_another_base_is_refused_at_the_start(tmp_path: Path, record_property: Record) -> None:
    base = tmp_path / "base"
    shutil.copytree(NANO, base)
    weights = mx.load(str(base / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(base / "model.safetensors"), {name: array * 1.5 for name, array in weights.items()})
    other = server(tmp_path / "other", model=str(base))
    other.spawn()
    try:
        other.wait()
        run = Trainer(tmp_path / "run", "trainer.steps=1", urls=["local", other.url])
        code = run.process.wait(60)
    finally:
        quiet_end([other])
    reason = f"rollout.engines: {other.url}: this server has the base {base} (sha256 "
    is_refused = code == os.EX_CONFIG and reason in run.output
    record_property("replicas.control_other_base_refused", int(is_refused))
    assert is_refused, run.output
