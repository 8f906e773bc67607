"""What people who watch a run cost it: steps a second, time between tokens, and the end after Ctrl-C."""

import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread

import httpx

from bench.compare import in_turns, p99, print_table, ratio
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import SCRIPTS, Server, metrics, running

RUN = (
    "+recipe=arithmetic_grpo",
    "trainer.steps=100000",
    "trainer.evaluate_every=0",
    "trainer.evaluate_problems=0",
    "server.state=off",
    "name=watched",
)
PROGRAM = str(SCRIPTS / "bench" / "workers" / "watched_run.py")
WATCHERS = 3
STREAMS = 8
TOKENS = 48
SLEEP = 0.02
POLL_SECONDS = 0.02
PULSE_SECONDS = 1.0
ROUNDS_A_REPORT = 15


@contextmanager
def watched(url: str, count: int) -> Iterator[None]:
    """So many clients read the history, and then events as they come."""
    is_over = Event()

    def watch() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            client.get("/v1/runs/current/history", params={"points": 1024}).raise_for_status()
            with client.stream("GET", "/v1/events") as events:
                for _ in events.iter_raw():
                    if is_over.is_set():
                        return

    threads = [Thread(target=watch) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()  # the next pulse, PULSE_SECONDS later, ends them
        for thread in threads:
            thread.join()


def step_seconds(server: Server, run: Path, steps: int, count: int) -> float:
    """Seconds of each of so many steps that begin and end with `count` watchers."""
    with watched(server.url, count):
        first = len(metrics(run)) + 1  # the one at work may have begun before
        while len(rows := metrics(run)) <= first + steps:
            server.check_alive()
            time.sleep(POLL_SECONDS)
    return float(rows[first + steps]["time"] - rows[first]["time"]) / steps


def steps_ratio(request: Request, variables: dict[str, str]) -> tuple[float, list[str]]:
    """Steps a second with watchers against none, and the lines of their cost."""
    steps, rounds = request.size(8, 1), request.size(7, 1)
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, run, cost = Path(name), Path(name) / "run", Path(name) / "cost"
        overrides = (*RUN, f"hydra.run.dir={run}")
        server = stack.enter_context(running(PROGRAM, overrides, folder, variables | {"WATCHED_COST": str(cost)}))
        while len(metrics(run)) < 2:  # the first steps prepare shapes
            server.check_alive()
            time.sleep(POLL_SECONDS)
        seconds = in_turns(
            rounds,
            {
                "none": lambda _: step_seconds(server, run, steps, 0),
                "watched": lambda _: step_seconds(server, run, steps, WATCHERS),
            },
        )
        return ratio(seconds["none"], seconds["watched"]), cost.read_text().splitlines()


@measurement(
    {
        "dashboard.steps_ratio": Bar(min=0.99),
        "dashboard.steps_ratio_of_control": Bar(max=0.99),
        "dashboard.code_fraction_of_steps": Bar(max=0.01),
    },
    minutes=6,
)
def steps_with_watchers(request: Request) -> Figures:
    """Steps a second of the quickstart with three watchers against none; the control sleeps 2% of each watched step."""
    found, lines = steps_ratio(request, {})
    control, _ = steps_ratio(request, {"WATCHED_SLEEP": str(SLEEP)})
    pairs = [tuple(map(float, line.split())) for line in lines]
    share = sum(cost for cost, _ in pairs) / sum(seconds for _, seconds in pairs)
    print_table("Steps a second, watched over none", [("run", found), ("control", control), ("share of code", share)])
    return {
        "dashboard.steps_ratio": found,
        "dashboard.steps_ratio_of_control": control,
        "dashboard.code_fraction_of_steps": share,
    }


def token_gaps(url: str) -> list[float]:
    """Seconds between tokens of streams that run side by side."""

    def stream(number: int) -> list[float]:
        body = {"model": "base", "prompt": f"Tom has {number} pens", "max_tokens": TOKENS, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer,
        ):
            answer.raise_for_status()
            times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
        return [later - earlier for earlier, later in pairwise(times)]

    with ThreadPoolExecutor(STREAMS) as pool:
        return [gap for gaps in pool.map(stream, range(STREAMS)) for gap in gaps]


@measurement(
    {
        "dashboard.itl_p50_ratio": Bar(max=1.01),
        "dashboard.itl_p99_ratio": Bar(max=1.05),
        "dashboard.itl_p50_ratio_of_chance": Bar(),
        "dashboard.itl_p99_ratio_of_chance": Bar(),
    },
    minutes=18,
)
def tokens_with_watchers(request: Request) -> Iterator[Figures]:
    """Time between tokens of eight streams while the quickstart trains, with three watchers against none.

    Chance: a second side with none against none. The three sides of a round come in an order of their own, each
    after a wait, and quantiles are those of all rounds so far.
    """
    counts = {"none": 0, "none again": 0, "watched": WATCHERS}
    found: dict[str, list[float]] = {side: [] for side in counts}
    source, rounds = random.Random(0), request.size(45, 1)
    with TemporaryDirectory() as name, running("parallm.train", RUN, Path(name)) as server:
        token_gaps(server.url)
        for number in range(rounds):
            for side in source.sample(list(counts), len(counts)):
                time.sleep(PULSE_SECONDS)
                with watched(server.url, counts[side]):
                    found[side] += [gap for _ in range(request.size(4, 1)) for gap in token_gaps(server.url)]
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            if number % ROUNDS_A_REPORT == ROUNDS_A_REPORT - 1 or number == rounds - 1:
                yield gap_figures(found)


def gap_figures(found: Mapping[str, Sequence[float]]) -> Figures:
    """Quantiles of each side's gaps over those of the side `none`."""
    cut = {side: {"p50": 1e3 * median(gaps), "p99": 1e3 * p99(gaps)} for side, gaps in found.items()}
    rows = [(side, *parts.values()) for side, parts in cut.items()]
    print_table("Milliseconds between tokens", [("", "p50", "p99"), *rows])
    return {
        f"dashboard.itl_{part}_ratio{name}": cut[side][part] / cut["none"][part]
        for side, name in (("watched", ""), ("none again", "_of_chance"))
        for part in ("p50", "p99")
    }


def _is_paused(url: str) -> bool:
    """Pause, so that no step is at work when the signal comes, and return whether it holds."""
    answer = httpx.post(f"{url}/v1/training/pause", trust_env=False)
    return answer.is_success and answer.json()["state"] == "paused"


@measurement({"dashboard.end_seconds_more": Bar(max=1.0)}, minutes=2)
def end_with_watchers(request: Request) -> Figures:
    """Seconds by which a run ends later after Ctrl-C, or SIGTERM, where three pages watch."""
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)

    def seconds(number: int, count: int) -> float:
        with TemporaryDirectory() as name:
            server = Server("parallm.train", [*RUN, "rollout.problems_per_step=2"], Path(name))
            server.spawn()
            server.wait()
            with watched(server.url, count):
                while not _is_paused(server.url):
                    time.sleep(POLL_SECONDS)
                time.sleep(1.5)  # a pulse has come
                began = time.monotonic()
                server.process.send_signal(signals[number % 2])
                server.wait_to_end(60)
                return time.monotonic() - began

    rounds = in_turns(
        request.size(6, 2),
        {"none": lambda number: seconds(number, 0), "watched": lambda number: seconds(number, WATCHERS)},
    )
    pairs = zip(rounds["watched"], rounds["none"], strict=True)
    return {"dashboard.end_seconds_more": median(one - other for one, other in pairs)}
