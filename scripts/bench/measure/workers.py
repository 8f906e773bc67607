"""Several workers on the GPUs of a host: how their speed scales, what the exchange costs, and who waits for it."""

import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import numpy as np
from simulate_steps import predicted_efficiency

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement, num_gpus
from bench.processes import clean_environment, free_port, metrics, worker_command
from parallm.distributed.launcher import devices

SIZES = (2, 4, 8)
STREAMS, STREAM_SECONDS = 8, 6.0
LIMIT_SECONDS = 300.0
LEADER_BARS = {2: 0.97, 4: 0.95, 8: 0.92}
WORDS = 384
"""Size of the embedded model's vocabulary, so that every token of a stream has a text."""
QUIET = ("trainer.evaluate_problems=0", "rollout.refill_rounds=0", "learner.learning_rate=1e-6", "name=bench")
WHOLE = "seconds from the step before"
"""With what happens between steps."""
TIMES = {WHOLE: "step s", "seconds/rollout": "sampling s", "seconds/update": "update s"}
COLUMNS = TIMES | {
    "exchange/wait_seconds": "waits s",
    "exchange/gather_seconds": "gathers s",
    "exchange/sum_seconds": "sum s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run on random weights."""

    shape: str
    rows: int
    """Completions of a step, in groups of 8."""
    tokens: int
    """Length of a completion."""
    steps: int
    warm_up: int = 2
    """Steps that do not count; one at least, as a step is timed from the end of the one before."""
    most_rows: int | None = None
    """engine.max_rows; None: its default."""
    ahead: int = 0
    """trainer.max_off_policy_steps."""

    def overrides(self, rows: int, problems: str = "Lottery") -> list[str]:
        return [
            *("environment=custom", f"environment.target=bench.problems:{problems}", "rollout.group_size=8"),
            *(f"rollout.problems_per_step={rows // 8}", f"rollout.max_tokens={self.tokens}", "checkpoint.every=1000"),
            *([] if self.most_rows is None else [f"engine.max_rows={self.most_rows}"]),
            *(f"trainer.max_off_policy_steps={self.ahead}", *QUIET),
            f"trainer.steps={self.warm_up + self.steps + self.ahead}",
        ]


@measurement(
    {
        **{f"workers.weak_{size}": Bar(min=0.97 if size == 2 else 0.95, needs=f"gpus{size}") for size in (2, 4)},
        **{f"workers.8b.weak_{size}": Bar(min=0.97 if size == 2 else 0.95, needs=f"gpus{size}") for size in (2, 4)},
        **{f"workers.ahead_{size}": Bar(min=0.97 if size == 2 else 0.95, needs=f"gpus{size}") for size in (2, 4)},
        **{f"workers.strong_{size}": Bar(min=0.85, needs=f"gpus{size}") for size in (2, 4)},
        **{f"workers.{kind}_{size}": Bar() for kind in ("straggler_estimate", "weak_predicted") for size in (2, 4)},
        "workers.exchange_fraction": Bar(max=0.01, needs="gpus2"),
        "workers.8b.exchange_fraction": Bar(max=0.01, needs="gpus2"),
    },
    minutes=5,
    needs="gpus2",
    is_quick_anywhere=True,
)
def scaling(request: Request) -> Iterator[Figures]:
    """Weak: samples/s per worker of 128 rows x 256 tokens each, over one worker's. Ahead: the same with a step sampled
    ahead, by one worker, too. Strong: samples/s of 512 rows x 512 on all, over as many times one worker's. Single
    processes run beside each other, on a GPU each.

    Straggler estimate: the weak scaling of as many independent runs of one worker each, if they had waited for the
    slowest of them after sampling and after the update: what stragglers alone cost, as far as this host is as noisy a
    minute later. Weak predicted: what `simulate_steps.py` expects by the steps of one worker."""
    weak = Job(shape="0.5b", rows=128, tokens=256, steps=15)
    large = Job(shape="8b", rows=128, tokens=256, steps=3, warm_up=1)
    if request.is_quick:
        tiny = {"shape": "tiny", "steps": 2, "warm_up": 1}
        weak, large = Job(rows=16, tokens=16, **tiny), Job(rows=16, tokens=16, **tiny)
    strong = strong_job(request)
    jobs = {"weak": weak, "8b.weak": large, "ahead": replace(weak, ahead=1), "strong": strong}
    sizes = [size for size in SIZES if size <= (num_gpus() or 2)]

    def wants(name: str, size: int) -> bool:
        return any(map(request.wants, figures_of(name, size)))

    ones = alone({name: job for name, job in jobs.items() if any(wants(name, size) for size in sizes)})
    for name, rows in ones.items():
        show(f"{name}, one worker", rows)
    for size, name in itertools.product(sizes, ones):
        if not wants(name, size):
            continue
        job = jobs[name]
        found = run(job, workers=size, rows=job.rows if name == "strong" else job.rows * size)
        show(f"{name}, {size} workers", found)
        figures: Figures = {f"workers.{name}_{size}": speedup(ones[name], found) / (size if name == "strong" else 1)}
        if name == "weak":
            expected = predicted_efficiency(ones[name], size, row_tokens=job.tokens)
            figures[f"workers.weak_predicted_{size}"] = expected
        if name == "weak" and request.wants(f"workers.straggler_estimate_{size}"):
            slowest = slowest_of(apart(job, size))
            show(f"{name}, the slowest of {size} runs", slowest)
            figures[f"workers.straggler_estimate_{size}"] = speedup(ones[name], slowest)
        if size == 2 and name.endswith("weak"):
            part = median(row["exchange/sum_seconds"] / row[WHOLE] for row in found)
            figures[f"workers.{name.removesuffix('weak')}exchange_fraction"] = part
        yield figures


def strong_job(request: Request) -> Job:
    if request.is_quick:
        return Job(shape="tiny", rows=32, tokens=16, steps=2, warm_up=1)
    return Job(shape="0.5b", rows=512, tokens=512, steps=3, warm_up=2)


@measurement({f"workers.strong_share_{size}": Bar() for size in (2, 4)}, minutes=2, needs="gpu", is_quick_anywhere=True)
def shares(request: Request) -> Iterator[Figures]:
    """Seconds of a step of a lone worker with all rows of strong scaling, over as many times those of one with its
    share: what strong scaling would be if nothing were lost between workers. Fewer rows leave more of a GPU idle."""
    job = strong_job(request)
    whole = run(job, workers=1, rows=job.rows)
    show(f"{job.rows} rows", whole)
    for size in (2, 4):
        if request.wants(f"workers.strong_share_{size}"):
            share = run(job, workers=1, rows=job.rows // size)
            show(f"{job.rows // size} rows", share)
            yield {f"workers.strong_share_{size}": speedup(whole, share) / size}


def figures_of(name: str, size: int) -> list[str]:
    """The figures that a job with as many workers gives."""
    more = [f"{kind}_{size}" for kind in ("straggler_estimate", "weak_predicted")] if name == "weak" else []
    if size == 2 and name.endswith("weak"):
        more.append(name.removesuffix("weak") + "exchange_fraction")
    return [f"workers.{figure}" for figure in (f"{name}_{size}", *more)]


def speedup(one: Sequence[dict[str, Any]], many: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps of one worker over those of as many steps of many."""
    return fmean(row[WHOLE] for row in one) / fmean(row[WHOLE] for row in many)


def alone(jobs: dict[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """Each job by one worker; as many at a time as there are GPUs, the longest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    waiting = sorted(jobs, key=lambda name: -jobs[name].rows * jobs[name].tokens)
    lock = threading.Lock()

    def work_through(device: str | None) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name = waiting.pop(0)
            found[name] = run(jobs[name], workers=1, rows=jobs[name].rows, device=device)

    threads = [threading.Thread(target=work_through, args=(device,)) for device in devices() or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in jobs}


def apart(job: Job, size: int) -> list[list[dict[str, Any]]]:
    """The rows of as many runs of one worker at once, on a GPU each."""
    chosen: list[str | None] = [*devices()[:size]] or [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda device: run(job, workers=1, rows=job.rows, device=device), chosen))


def slowest_of(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a run that waits for the slowest of `runs` in both parts of each step."""
    parts = [name for name in TIMES if name != WHOLE]
    found: list[dict[str, Any]] = []
    for step in zip(*runs, strict=True):
        slowest = {name: max(row[name] for row in step) for name in parts}
        rest = max(row[WHOLE] - sum(row[name] for name in parts) for row in step)
        found.append({WHOLE: sum(slowest.values()) + rest} | slowest)
    return found


def run(
    job: Job, *, workers: int, rows: int, device: str | None = None, echoes: int = 0, late_seconds: float = 0.0
) -> list[dict[str, Any]]:
    """The rows of metrics of a run after its warm-up. Raises RuntimeError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [*job.overrides(rows, "Anonymous" if echoes else "Lottery"), "server=off", "metrics.display=off"]
        if echoes:  # the numbers of others are not those of their tokens
            overrides.append("trainer.guard.on_divergence=warn")
        options: dict[str, Any] = {"device": device, "echoes": echoes, "late_seconds": late_seconds}
        with started(job.shape, folder, workers=workers, overrides=overrides, **options) as process:
            code = process.wait(LIMIT_SECONDS)
        if code:
            raise RuntimeError(f"{workers} workers ended with {code}:\n{(folder / 'output').read_text()[-3000:]}")
        found = metrics(folder / "run")[job.warm_up - 1 : job.warm_up + job.steps]  # the last steps sample none ahead
    return [row | {WHOLE: row["time"] - before["time"]} for before, row in pairwise(found)]


@contextmanager
def started(
    shape: str,
    folder: Path,
    *,
    workers: int,
    overrides: Sequence[str],
    device: str | None = None,
    vocabulary: int | None = None,
    restarts: int = 0,
    echoes: int = 0,
    late_seconds: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A run in `folder`/run, killed if it has not ended by then."""
    own = {"shape": shape, "vocabulary": vocabulary, "workers": workers, "restarts": restarts}
    own |= {"echoes": echoes, "late_seconds": late_seconds}
    own |= {"overrides": list(overrides), "run": str(folder / "run")}
    variables = clean_environment() | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(worker_command("shared_run", own), env=variables, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = [name for name in COLUMNS if name in rows[0]]
    print_table(
        title, [tuple(COLUMNS[name] for name in columns), *(tuple(row[name] for name in columns) for row in rows)]
    )


@measurement(
    {
        **{f"workers.leader_{size}": Bar(min=least, needs="gpu") for size, least in LEADER_BARS.items()},
        "workers.control_leader": Bar(max=LEADER_BARS[2], needs="gpu"),
    },
    minutes=5,
    needs="gpu",
    is_quick_anywhere=True,
)
def leader(request: Request) -> Figures:
    """Seconds of a step of a lone worker, 128 rows x 256 tokens, over those of rank 0 of several workers whose peers
    answer at once: what weak scaling loses by what rank 0 plans, reports and writes for all. One GPU does. The lone one
    runs before and after the others, as hosts become slower and faster. Control: the peer of rank 0 of 2 comes a tenth
    of a step late."""
    job = Job(shape="0.5b", rows=128, tokens=256, steps=12)
    if request.is_quick:
        job = Job(shape="tiny", rows=16, tokens=16, steps=2, warm_up=1)

    def step(title: str, size: int, late_seconds: float = 0.0) -> float:
        rows = run(job, workers=1, rows=job.rows * size, echoes=size, late_seconds=late_seconds)
        show(title, rows)
        return median(row[WHOLE] for row in rows)

    before = step("one worker", 1)
    steps = {
        f"workers.leader_{size}": step(f"rank 0 of {size} workers", size)
        for size in LEADER_BARS
        if request.wants(f"workers.leader_{size}")
    }
    if request.wants("workers.control_leader"):
        steps["workers.control_leader"] = step("rank 0 of 2 workers, the other late", 2, before / 10)
    alone = fmean([before, step("one worker again", 1)])
    return {name: alone / seconds for name, seconds in steps.items()}


@measurement(
    {
        "workers.streams_p99_ratio": Bar(max=1.05, needs="gpus2"),
        "workers.streams_p50_ratio": Bar(),
        "workers.streams_p99_ms": Bar(),
        "workers.seconds_to_new_gang_gpu": Bar(max=10, needs="gpus2"),
        "workers.seconds_to_next_version_gpu": Bar(),
    },
    minutes=1.5,
    needs="gpus2",
    is_quick_anywhere=True,
)
def waiting(request: Request) -> Figures:
    """Time between tokens of 8 streams while their worker's step waits for a stopped peer, over that while training is
    paused, measured before and after. Then the peer is killed: seconds to the next gang's processes and version."""
    job = Job(shape="tiny" if request.is_quick else "0.5b", rows=32, tokens=64, steps=100_000)
    seconds = request.size(int(STREAM_SECONDS), 2)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        overrides = [*job.overrides(job.rows), f"server.port={port}", "metrics.display=off", "server.state=off"]
        with (
            started(job.shape, folder, workers=2, overrides=overrides, vocabulary=WORDS, restarts=1) as process,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
        ):
            watch = Watch(folder, process)
            watch.wait_for_version(2)
            client.post("/v1/training/pause").raise_for_status()
            time.sleep(1)
            gaps(client, seconds / 2)  # the engine compiles its steps
            before = gaps(client, seconds)
            client.post("/v1/training/resume").raise_for_status()
            watch.wait_for_version(watch.newest() + 2)
            peer = watch.process_of(1)
            os.kill(peer, signal.SIGSTOP)
            time.sleep(seconds / 2)  # the step ends its own part
            during = gaps(client, seconds)
            os.kill(peer, signal.SIGCONT)
            client.post("/v1/training/pause").raise_for_status()
            time.sleep(1)
            after = gaps(client, seconds)
            client.post("/v1/training/resume").raise_for_status()
            watch.wait_for_version(watch.newest() + 1)
            killed, newest = time.time(), watch.newest()
            os.kill(peer, signal.SIGKILL)
            watch.wait_for_version(newest + 1)
            next_version = time.time() - killed
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_SECONDS)
        began = [json.loads(line)["began"] for line in (folder / "run/ranks/gangs.jsonl").read_text().splitlines()]
    quiet = np.concatenate([before, after])
    cut = {part: (np.percentile(during, part), np.percentile(quiet, part)) for part in (50, 99)}
    rows = [
        (name, len(one), *(1000 * np.percentile(one, part) for part in (50, 90, 99, 100)))
        for name, one in (("paused", before), ("a step waits", during), ("paused again", after))
    ]
    print_table("Milliseconds between tokens of 8 streams", [("", "gaps", "p50", "p90", "p99", "longest"), *rows])
    return {
        "workers.streams_p99_ratio": float(cut[99][0] / cut[99][1]),
        "workers.streams_p50_ratio": float(cut[50][0] / cut[50][1]),
        "workers.streams_p99_ms": float(1000 * cut[99][0]),
        "workers.seconds_to_new_gang_gpu": min(one for one in began if one > killed) - killed,
        "workers.seconds_to_next_version_gpu": next_version,
    }


class Watch:
    """What a run tells in its folder."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._process = folder, process

    def newest(self) -> int:
        log = self._folder / "run" / "run.log"
        found = re.findall(r"all workers hold version (\d+)", log.read_text()) if log.exists() else []
        return int(found[-1]) if found else -1

    def wait_for_version(self, version: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.newest() < version:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no version {version}:\n{(self._folder / 'output').read_text()[-3000:]}")
            time.sleep(0.02)

    def process_of(self, rank: int) -> int:
        status = json.loads((self._folder / "run" / "ranks" / str(rank) / "worker.json").read_text())
        return int(status["process"])


def gaps(client: httpx.Client, seconds: float) -> np.ndarray:
    """Seconds between events of 8 streams."""
    found: list[list[float]] = [[] for _ in range(STREAMS)]

    def stream(place: int) -> None:
        body = {"model": "base", "prompt": f"{place} + 3 =", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            with client.stream("POST", "/v1/completions", json=body | {"seed": place}) as answer:
                last = None
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            found[place].append(now - last)
                        last = now
                        if now > ends:
                            break

    threads = [threading.Thread(target=stream, args=(place,)) for place in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate([np.array(one) for one in found])
