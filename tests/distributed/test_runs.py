"""Whole runs of several workers as processes over TCP rings, with the embedded model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from parallm.metrics.rollout_format import GroupRow, RolloutFile, decode
from tests.distributed.conftest import ROOT, TINY, Workers, free_ports

MakeWorkers = Callable[[str], Workers]
EXACT = ("distributed.exact=true", "trainer.max_off_policy_steps=0")
EXCHANGE_FAILED = 75


def test_a_killed_worker_ends_the_other_and_one_goes_on_with_the_versions_of_an_undisturbed_run(
    workers: MakeWorkers,
) -> None:
    whole, group = workers("whole"), workers("group")
    keys = (*EXACT, "trainer.steps=5")
    whole.run(1, *keys)
    group.start(2, *keys)
    wait_for_version(group, 2)
    group.processes[0].kill()  # the one that alone writes checkpoints
    (killed, _), (code, output) = group.wait()
    assert (killed, code) == (-signal.SIGKILL, EXCHANGE_FAILED), output
    assert "rank 0 is gone" in str(group.status(1)["reason"])
    (saved,) = (group.folder / "run" / "ranks" / "1").glob("step_*")
    group.run(1, *keys, "checkpoint.resume=auto")
    assert not saved.exists()
    assert len(whole.digests()) == 6
    assert group.digests() == whole.digests()


def test_only_the_first_rank_writes_and_all_tell_of_themselves(workers: MakeWorkers) -> None:
    group = workers("group")
    group.run(2, "trainer.steps=1")
    assert (group.folder / "run" / "step_000001").is_dir()
    (file,) = completions(group)
    learned = [has_numbers(file, place) for place, row in enumerate(file.groups) if has_signal(row)]
    assert learned
    assert all(learned)
    other = group.folder / "run" / "ranks" / "1"
    assert sorted(path.name for path in other.iterdir()) == ["config.yaml", "run.log", "worker.json"]
    assert [group.status(rank)["state"] for rank in (0, 1)] == ["finished", "finished"]


def test_workers_that_miss_one_at_the_start_end_for_now(workers: MakeWorkers) -> None:
    group = workers("two")
    group.start(2, "distributed.timeout_seconds=2")
    group.processes[1].kill()
    code, output = group.wait()[0]
    assert code == EXCHANGE_FAILED
    assert "1 of 2 workers have not come" in output


def test_another_configuration_ends_all_before_anything_is_loaded(workers: MakeWorkers) -> None:
    group = workers("two")
    began = time.monotonic()
    group.start(2, changes={1: ["learner.learning_rate=1e-4"]})
    for code, output in group.wait():
        assert code == 78
        assert "learner.learning_rate is 0.0001 at rank 1 and 0.002 at rank 0; it must be the same" in output
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_launcher_without_distributed_is_refused(workers: MakeWorkers) -> None:
    group = workers("two")
    group.start(2, "distributed.engine=off")
    for code, output in group.wait():
        assert code == 78
        assert "set distributed=mlx" in output


@pytest.mark.slow
def test_a_stop_asked_of_one_is_a_stop_of_all_at_the_same_step(workers: MakeWorkers) -> None:
    group = workers("two")
    group.start(2, "trainer.steps=100000", "checkpoint.every=100000")
    wait_for_version(group, 2)
    group.processes[1].send_signal(signal.SIGINT)
    ended = group.wait()
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(list((group.folder / "run").glob("step_*"))) == 1
    assert [group.status(rank)["state"] for rank in (0, 1)] == ["finished", "finished"]


@pytest.mark.slow
def test_the_command_starts_the_workers_and_ends_with_their_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parallm.train", *TINY, "distributed.workers=2", "hydra.run.dir=run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([*command, "trainer.steps=1"], cwd=tmp_path, env=environment, check=False).returncode == 0
    assert json.loads((tmp_path / "run/ranks/1/worker.json").read_text())["state"] == "finished"
    running = subprocess.Popen(
        [*command, "trainer.steps=100000"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    try:
        status = tmp_path / "run/ranks/1/worker.json"
        deadline = time.monotonic() + 30
        while json.loads(status.read_text() or "{}").get("state") != "running":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(json.loads(status.read_text())["process"], signal.SIGKILL)
        _, error = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGKILL
    # one that is still joining the group is asked to end
    assert re.search(rb"rank 0 (ended with 75|was killed by signal 15), rank 1 was killed by signal 9", error)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a run of two workers, both of which have begun to train."""
    keys = ("distributed.workers=2", "hydra.run.dir=run", "trainer.steps=100000", "checkpoint.every=100000")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "parallm.train", *TINY, *keys]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        wait_for(lambda: len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) > 1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("send", [os.kill, pytest.param(os.killpg, marks=pytest.mark.slow)])
def test_an_interrupt_of_the_command_lets_workers_save_and_end(
    launched: subprocess.Popen[bytes], tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    """`kill -INT` signals the command alone, Ctrl-C in a terminal its workers as well."""
    send(launched.pid, signal.SIGINT)
    assert launched.wait(60) == 0
    assert states(tmp_path / "run") == ["finished", "finished"]
    assert len(list((tmp_path / "run").glob("step_*"))) == 1


def test_workers_save_and_end_when_their_command_is_killed(launched: subprocess.Popen[bytes], tmp_path: Path) -> None:
    launched.kill()
    wait_for(lambda: states(tmp_path / "run") == ["finished", "finished"])
    assert len(list((tmp_path / "run").glob("step_*"))) == 1


def states(run: Path) -> list[str]:
    return [json.loads((run / "ranks" / str(rank) / "worker.json").read_text())["state"] for rank in (0, 1)]


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError, ValueError):  # a file is not there yet, or half of it
            if is_so():
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_version(group: Workers, version: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            if group.digests().get(version) is not None:
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < deadline, [process.poll() for process in group.processes]
        assert all(process.poll() is None for process in group.processes)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_workers(workers: MakeWorkers) -> None:
    whole, group = workers("whole"), workers("group")
    keys = (*EXACT, "rollout.refill_below=1", "trainer.evaluate_every=2")
    whole.run(1, *keys, "trainer.steps=6")
    for size, steps in ((1, 2), (3, 4), (1, 5), (2, 6)):
        group.run(size, *keys, f"trainer.steps={steps}", "checkpoint.resume=auto")
    assert group.digests() == whole.digests()
    paths = [one.folder / "run" / "evaluations.jsonl" for one in (whole, group)]
    expected, found = ([json.loads(line) | {"time": 0} for line in path.read_text().splitlines()] for path in paths)
    assert len(expected) == 4
    assert found[-1] == expected[-1]


@pytest.mark.slow
def test_resumed_workers_make_up_an_evaluation_together(workers: MakeWorkers) -> None:
    group = workers("group")
    group.run(2, "trainer.steps=1", "trainer.evaluate_problems=0")
    group.run(2, "trainer.steps=1", "trainer.evaluate_problems=4", "checkpoint.resume=auto")
    (line,) = (group.folder / "run" / "evaluations.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["heldout/problems"]) == (1, 4)


@pytest.mark.slow
def test_a_frozen_worker_ends_the_run_after_the_time_limit(workers: MakeWorkers) -> None:
    group = workers("group")
    group.start(2, "trainer.steps=100000", "checkpoint.every=100000", "distributed.timeout_seconds=3")
    wait_for_version(group, 2)
    group.processes[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert group.processes[0].wait(20) == EXCHANGE_FAILED
    assert time.monotonic() - began < 15
    assert re.search(r"no answer in 3 seconds .* which waited for rank 1", str(group.status(0)["reason"]))
    assert list((group.folder / "run").glob("step_*"))
    group.processes[1].send_signal(signal.SIGCONT)
    assert [code for code, _ in group.wait()] == [EXCHANGE_FAILED] * 2


@pytest.mark.slow
def test_answers_stream_on_while_a_step_waits_for_a_worker(workers: MakeWorkers) -> None:
    group = workers("group")
    port = free_ports(1)[0]
    server = ("server.enabled=true", f"server.port={port}")
    group.start(2, "trainer.steps=100000", *server, changes={1: ["server.port=0"]})
    wait_for_version(group, 2)
    request = {"model": "base", "prompt": "2 + 3 =", "max_tokens": 400, "stream": True, "ignore_eos": True}
    gaps: list[float] = []
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=request) as answer,
    ):
        for number, _ in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            if number == 20:
                group.processes[1].send_signal(signal.SIGSTOP)
                time.sleep(0.5)  # the step ends its own part
                last = time.monotonic()
            elif number > 20:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            if number == 300:
                break
    group.processes[1].send_signal(signal.SIGCONT)
    assert len(gaps) == 280
    assert sorted(gaps)[-10] < 0.1
    group.processes[0].send_signal(signal.SIGINT)
    assert [code for code, _ in group.wait()] == [0, 0]


@pytest.mark.slow
def test_workers_that_sample_ahead_and_refill_make_the_same_versions(workers: MakeWorkers) -> None:
    """They compare their draws with each groups, and versions before each step: a difference ends the run."""
    group = workers("group")
    group.run(3, "trainer.max_off_policy_steps=1", "rollout.refill_below=1", "trainer.steps=8", "rollout.group_size=2")
    assert len(group.digests()) == 9
    rows = [json.loads(line) for line in (group.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["groups/sampled"] for row in rows) > 3, "some step refills"
    assert all(row["exchange/wait_seconds"] <= row["time"] - before["time"] for before, row in pairwise(rows))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "sampling",
    [("rollout.refill_below=1",), ("trainer.max_off_policy_steps=1", "rollout.refill_rounds=0")],
    ids=["refills", "ahead"],
)
def test_more_workers_make_the_versions_of_one(
    size: int, sampling: tuple[str, ...], workers: MakeWorkers, record_property: Callable[[str, object], None]
) -> None:
    one, many = workers("one"), workers("many")
    keys = (*EXACT, *sampling, "trainer.evaluate_every=1", "trainer.steps=5")
    one.run(1, *keys)
    many.run(size, *keys)
    expected, found = one.digests(), many.digests()
    record_property("workers.exact_equal", sum(found.get(key) == digest for key, digest in expected.items()) / 6)
    assert len(expected) == 6
    assert found == expected
    for ours, theirs in zip(completions(one), completions(many), strict=True):
        assert ours.groups == theirs.groups
        assert {name: array.tobytes() for name, array in ours.arrays.items()} == {
            name: array.tobytes() for name, array in theirs.arrays.items()
        }


def completions(group: Workers) -> list[RolloutFile]:
    """What the run has written of each step."""
    return [decode(path.read_bytes()) for path in sorted((group.folder / "run" / "rollouts").glob("*.safetensors"))]


def has_signal(row: GroupRow) -> bool:
    return len({one["reward"] for one in row["completions"]}) > 1


def has_numbers(file: RolloutFile, place: int) -> bool:
    """Whether the learner's numbers of all completions of this group are there."""
    return all(
        file.tokens(place, index).entropies_T is not None for index in range(len(file.groups[place]["completions"]))
    )
