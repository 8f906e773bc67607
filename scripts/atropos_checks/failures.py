"""Checks 6, 7 and 11: run-api, an environment and the trainer are killed."""

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from clients import Traffic, stream_for
from server_process import free_port

from atropos_checks.stage import (
    QUESTION,
    Bench,
    Finding,
    RunApi,
    Trainer,
    base_overrides,
    expect,
    run_api,
    sampled,
    trainer,
    wait_until,
)


def started(bench: Bench, api: str, *names: str) -> list[str]:
    """Overrides of a run that starts run-api at `api` and an environment of the template for each name."""
    environments = ", ".join(f"{name}: {{script: '{{recipes}}/atropos/words.py'}}" for name in names)
    return [
        *base_overrides(api),
        "rollout.atropos.start.api=true",
        f"rollout.atropos.start.python={bench.python}",
        f"rollout.atropos.start.environments={{{environments}}}",
    ]


def api_killed(bench: Bench) -> Finding:
    """run-api dies under a run that has started it, and under one that has joined it while an environment posts on."""
    remark = f"{respawned(bench.of('started'))}; {poisoned(bench.of('joined'))}"
    return Finding(remark=remark)


def respawned(bench: Bench) -> str:
    url = f"http://127.0.0.1:{free_port()}"
    with trainer(bench, started(bench, url, "words")) as one, streaming(one.url) as traffic:
        one.wait_for_step(2)
        killed = one.step()
        kill(f"atroposlib.api:app --no-access-log --host 127.0.0.1 --port {url.rpartition(':')[2]}")
        one.wait_for_step(killed + 4)
        rows = one.rows()
    expect([row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps do not follow one another")
    batches = [row["atropos/batches"] for row in rows]
    expect(all(before < after for before, after in itertools.pairwise(batches)), "a batch was trained twice")
    expect(rows[-1]["atropos/lost"] >= 1, "the control: nobody has noticed that run-api was killed")
    log = (bench.folder / "run" / "atropos" / "words.log").read_text()
    expect(log.count("Initialized env with id 0") >= 2, "the environment was not started again")
    expect(traffic.finished > 0 and not traffic.errors, f"{len(traffic.errors)} streams failed: {traffic.errors[:1]}")
    return (
        f"killed after step {killed}, trained on to {len(rows)}, {traffic.finished} streams meanwhile without an error"
    )


def poisoned(bench: Bench) -> str:
    with run_api(bench) as api, trainer(bench, base_overrides(api.url)) as one:
        api.put(*(sampled(one, 4, seed=seed) for seed in range(2)))
        one.wait_for_step(1)
        groups = [sampled(one, 4, seed=seed) for seed in range(2, 4)]
        api.kill()
        api.start()
        posted = post_all_the_time(api, seconds=6.0)
        wait_until(lambda: api.get("/info") == {"batch_size": 8, "max_token_len": 256}, "the right /info")
        expect("posted before any trainer" in one.log(), "the control: the API was not poisoned")
        api.put(*groups)
        one.wait_for_step(2)
    return f"an API poisoned by {posted} early posts was reset and trained on"


def post_all_the_time(api: RunApi, *, seconds: float) -> int:
    """Groups of no use, as soon as run-api is there and for some seconds; how many it has taken."""
    taken = 0
    group = {"tokens": [[1]] * 3, "masks": [[-100]] * 3, "scores": [0.0] * 3}

    def post() -> bool:
        return api.post("/scored_data", group).status_code == 200

    wait_until(post, "run-api again")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        taken += post()
    return 1 + taken


def environment_killed(bench: Bench) -> Finding:
    """One of two dies, that with a minimum of each batch; another never posts; all generate when they die."""
    remark = f"{disconnected(bench.of('started'))}; {dead_with_a_minimum(bench.of('joined'))}"
    return Finding(remark=remark)


def disconnected(bench: Bench) -> str:
    url = f"http://127.0.0.1:{free_port()}"
    minimum = "rollout.atropos.start.environments.half.env={min_batch_allocation: 0.5}"
    overrides = [*started(bench, url, "half", "other"), minimum, "rollout.atropos.start.max_restarts=0"]
    with trainer(bench, overrides) as one:
        one.wait_for_step(2)
        step = one.step()
        kill(str(bench.folder / "run" / "atropos" / "half.json"))
        wait_until(lambda: "is disconnected from run-api" in one.log(), "the dead environment disconnected", 20)
        one.wait_for_step(step + 4)
        kill(str(bench.folder / "run" / "atropos" / "other.json"))
        wait_until(lambda: one.http.get("/v1/queue").json()["num_in_flight"] == 0, "nothing in flight", 20)
        expect(kv_used(one) == 0, f"{kv_used(one):.1%} of the memory for keys and values is held")
        one.wait_for_message("the environment half does not run")
    return f"killed after step {step}: disconnected, trained on, then nothing held"


def dead_with_a_minimum(bench: Bench) -> str:
    with run_api(bench) as api, trainer(bench, base_overrides(api.url)) as one:
        alive = api.register_environment(group_size=4)
        dead = api.register_environment(group_size=4, min_batch_allocation=0.5)
        api.put(*(sampled(one, 4, seed=seed) | {"env_id": alive} for seed in range(2)))
        one.wait_for_message(f"those with id {dead} have none", 30)
        expect(one.step() == 0, "the control: a dead environment with a minimum did not hold up the batch")
        api.post("/disconnect-env", {"env_id": dead}).raise_for_status()
        one.wait_for_step(1, 20)
    return "a minimum of a dead one was named, and training went on without it"


def trainer_killed(bench: Bench) -> Finding:
    """kill -9 after three steps; the next run goes on, the same size or not."""
    saving = ["checkpoint.every=1", "checkpoint.resume=auto"]
    with run_api(bench) as api:
        with suppress(RuntimeError), trainer(bench, [*base_overrides(api.url), *saving]) as one:
            for step in range(3):
                api.put(*(sampled(one, 4, seed=10 * step + number) for number in range(2)))
                one.wait_for_step(step + 1)
            wait_until((bench.folder / "run" / "step_000003").exists, "the third checkpoint")
            before = greedy(one, "policy@3")
            one.pause(on=True)
            api.put(*(sampled(one, 4, seed=seed) for seed in range(40, 46)))
            os.kill(one.process_id, signal.SIGKILL)
        api.get("/batch")  # forms what the killed trainer has not fetched, and takes one of it
        with trainer(bench, [*base_overrides(api.url), *saving]) as one:
            resumed = wait_until(lambda: line_with("resumed after", bench), "a resumed run")  # it answers before it is
            expect(resumed == "resumed after step 3, version 3", resumed)
            expect(greedy(one, "policy@3") == before, "the restored version answers otherwise")
            api.put(*(sampled(one, 4, seed=seed) for seed in range(50, 52)))
            one.wait_for_step(4)
            row = one.rows()[-1]
            unmatched = row["atropos/refused/unmatched"]
            expect(row["step"] == 4 and row["groups/sampled"] == 2 and unmatched >= 2, row)
            expect(unmatched == row["atropos/refused"], row)
        larger = [*base_overrides(api.url), *saving, "rollout.problems_per_step=4"]
        complaint = failure(bench, larger)
        expect("the API serves a trainer with batch_size=8" in complaint, complaint[-300:])
        with trainer(bench, [*larger, "rollout.atropos.reset=true"]):
            wait_until(lambda: api.get("/info")["batch_size"] == 16, "the new batch size at run-api")
    return Finding(
        remark="resumed bit for bit at step 3; old batches refused; another size refused, then taken by consent"
    )


def line_with(text: str, bench: Bench) -> str | None:
    """The first such line that a trainer has written."""
    lines = (bench.folder / "parallm.train.log").read_text().splitlines()
    return next((line for line in lines if text in line), None)


def greedy(one: Trainer, model: str) -> object:
    """What a version answers, with its log-probs."""
    body = {"model": model, "prompt": QUESTION, "max_tokens": 16, "temperature": 0, "logprobs": 1}
    return one.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]


def failure(bench: Bench, overrides: list[str]) -> str:
    """What a run says that ends by itself."""
    with suppress(RuntimeError), trainer(bench, overrides) as one:
        wait_until(lambda: one.status()["state"] == "failed", "its end")
    return (bench.folder / "parallm.train.log").read_text()


def kv_used(one: Trainer) -> float:
    """The share of memory for keys and values that is used when nothing is kept for later prompts."""
    one.http.post("/reset_prefix_cache").raise_for_status()
    return one.gauge("vllm:kv_cache_usage_perc")


def kill(text: str) -> None:
    """Kill the process whose command line ends with `text`; its keeper, which has the same words, lives on."""
    told = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    found = [line.split()[0] for line in told.splitlines() if line.endswith(text) and "keeper.py" not in line]
    expect(len(found) == 1, f"{len(found)} processes end with {text}")
    os.kill(int(found[0]), signal.SIGKILL)


@contextmanager
def streaming(url: str, *, clients: int = 2) -> Iterator[Traffic]:
    """Clients that stream meanwhile, and are told about afterwards."""
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
