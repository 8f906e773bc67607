"""A run goes on when run-api, an environment or the trainer itself is killed."""

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from bench.clients import Traffic, stream_for
from bench.processes import free_port

from tests.interop.atropos.stage import (
    QUESTION,
    RunApi,
    Stage,
    base_overrides,
    expect,
    greedy,
    kv_used,
    run_api,
    sampled,
    started,
    trainer,
    wait_until,
)


@pytest.mark.interop
def test_run_api_that_a_run_has_started_is_started_again(stage: Stage) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with trainer(stage, started(stage, url, "words")) as one, streaming(one.url) as traffic:
        one.wait_for_step(2)
        killed = one.step()
        kill(f"atroposlib.api:app --no-access-log --host 127.0.0.1 --port {url.rpartition(':')[2]}")
        one.wait_for_step(killed + 4)
        rows = one.rows()
    expect([row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps do not follow one another")
    batches = [row["atropos/batches"] for row in rows]
    expect(all(before < after for before, after in itertools.pairwise(batches)), "a batch was trained twice")
    expect(rows[-1]["atropos/lost"] >= 1, "the control: the run has not noticed that run-api was killed")
    log = (stage.folder / "run" / "atropos" / "words.log").read_text()
    expect(log.count("Initialized env with id 0") >= 2, "the environment was not started again")
    expect(traffic.finished > 0 and not traffic.errors, f"{len(traffic.errors)} streams failed: {traffic.errors[:1]}")


@pytest.mark.interop
def test_run_api_that_took_posts_before_any_trainer_is_reset(stage: Stage) -> None:
    with run_api(stage) as api, trainer(stage, base_overrides(api.url)) as one:
        api.put(*(sampled(one, 4, seed=seed) for seed in range(2)))
        one.wait_for_step(1)
        groups = [sampled(one, 4, seed=seed) for seed in range(2, 4)]
        api.kill()
        api.start()
        post_all_the_time(api, seconds=6.0)
        wait_until(lambda: api.get("/info") == {"batch_size": 8, "max_token_len": 256}, "the right /info")
        expect("posted before any trainer" in one.log(), "the control: the API was not poisoned")
        api.put(*groups)
        one.wait_for_step(2)


def post_all_the_time(api: RunApi, *, seconds: float) -> None:
    """Post groups of no use, as soon as run-api is there and for some seconds."""
    group = {"tokens": [[1]] * 3, "masks": [[-100]] * 3, "scores": [0.0] * 3}

    def post() -> bool:
        return api.post("/scored_data", group).status_code == 200

    wait_until(post, "run-api again")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        post()


@pytest.mark.interop
def test_a_dead_environment_is_disconnected_and_holds_nothing(stage: Stage) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    minimum = "rollout.atropos.start.environments.half.env={min_batch_allocation: 0.5}"
    overrides = [*started(stage, url, "half", "other"), minimum, "rollout.atropos.start.max_restarts=0"]
    with trainer(stage, overrides) as one:
        one.wait_for_step(2)
        step = one.step()
        kill(str(stage.folder / "run" / "atropos" / "half.json"))
        wait_until(lambda: "is disconnected from run-api" in one.log(), "the dead environment disconnected", 20)
        one.wait_for_step(step + 4)
        kill(str(stage.folder / "run" / "atropos" / "other.json"))
        wait_until(lambda: one.http.get("/v1/queue").json()["num_in_flight"] == 0, "nothing in flight", 20)
        expect(kv_used(one) == 0, f"{kv_used(one):.1%} of the memory for keys and values is held")
        one.wait_for_message("the environment half does not run")


@pytest.mark.interop
def test_a_run_goes_on_without_the_minimum_of_a_dead_environment(stage: Stage) -> None:
    with run_api(stage) as api, trainer(stage, base_overrides(api.url)) as one:
        alive = api.register_environment(group_size=4)
        dead = api.register_environment(group_size=4, min_batch_allocation=0.5)
        api.put(*(sampled(one, 4, seed=seed) | {"env_id": alive} for seed in range(2)))
        one.wait_for_message("an environment with a min_batch_allocation has no groups", 30)
        expect(one.step() == 0, "the control: a dead environment with a minimum did not hold up the batch")
        api.post("/disconnect-env", {"env_id": dead}).raise_for_status()
        one.wait_for_step(1, 20)


@pytest.mark.interop
def test_the_next_run_goes_on_after_the_trainer_was_killed(stage: Stage) -> None:
    """kill -9 after three steps; the next run has the same size or not."""
    saving = ["checkpoint.every=1", "checkpoint.resume=auto"]
    with run_api(stage) as api:
        with suppress(RuntimeError), trainer(stage, [*base_overrides(api.url), *saving]) as one:
            for step in range(3):
                api.put(*(sampled(one, 4, seed=10 * step + number) for number in range(2)))
                one.wait_for_step(step + 1)
            wait_until((stage.folder / "run" / "step_000003").exists, "the third checkpoint")
            before = greedy(one, "policy@3")
            one.pause(on=True)
            api.put(*(sampled(one, 4, seed=seed) for seed in range(40, 46)))
            one.server.kill()
        api.get("/batch")  # forms what the killed trainer has not fetched, and takes one of it
        with trainer(stage, [*base_overrides(api.url), *saving]) as one:
            resumed = wait_until(lambda: line_with("resumed after", stage), "a resumed run")  # it answers before it is
            expect(resumed == "resumed after step 3, version 3", resumed)
            expect(greedy(one, "policy@3") == before, "the restored version answers otherwise")
            api.put(*(sampled(one, 4, seed=seed) for seed in range(50, 52)))
            one.wait_for_step(4)
            row = one.rows()[-1]
            unmatched = row["atropos/refused/unmatched"]
            expect(row["step"] == 4 and row["groups/sampled"] == 2 and unmatched >= 2, row)
            expect(unmatched == row["atropos/refused"], row)
        larger = [*base_overrides(api.url), *saving, "rollout.problems_per_step=4"]
        complaint = failure(stage, larger)
        expect("the API serves a trainer with batch_size=8" in complaint, complaint[-300:])
        with trainer(stage, [*larger, "rollout.atropos.reset=true"]):
            wait_until(lambda: api.get("/info")["batch_size"] == 16, "the new batch size at run-api")


def line_with(text: str, stage: Stage) -> str | None:
    """The first line of a trainer's log with the text."""
    lines = (stage.folder / "parallm.train.log").read_text().splitlines()
    return next((line for line in lines if text in line), None)


def failure(stage: Stage, overrides: list[str]) -> str:
    """The log of a run that ends by itself."""
    with suppress(RuntimeError), trainer(stage, overrides) as one:
        wait_until(lambda: one.status()["state"] == "failed", "its end")
    return (stage.folder / "parallm.train.log").read_text()


def kill(text: str) -> None:
    """Kill the process whose command line ends with `text`; its watchdog, which has the same words, lives on."""
    listed = subprocess.run(["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    numbers = [line.split()[0] for line in listed.splitlines() if line.endswith(text) and "watchdog.py" not in line]
    expect(len(numbers) == 1, f"{len(numbers)} processes end with {text}")
    os.kill(int(numbers[0]), signal.SIGKILL)


@contextmanager
def streaming(url: str, *, clients: int = 2) -> Iterator[Traffic]:
    """Clients that stream meanwhile. Their traffic is complete after the block."""
    traffic, is_over = Traffic(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            found = asyncio.run(stream_for(url, [QUESTION], clients=clients, seconds=1, max_tokens=32))
            traffic.finished += found.finished
            traffic.errors += found.errors
            traffic.gaps += found.gaps

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield traffic
    finally:
        is_over.set()
        thread.join()
