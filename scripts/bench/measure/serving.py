"""What training costs the clients of the process, what publishing costs them, and what HTTP costs."""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.clients import Traffic, stream_for
from bench.compare import p99, print_table, ratio
from bench.measurement import Bar, Figures, Request, has_gpu, measurement
from bench.problems import environment_overrides, questions
from bench.processes import running, work

NUM_QUESTIONS, CLIENTS, MAX_TOKENS = 64, 8, 160
SECONDS_TO_FIRST_STEP, SECONDS_BETWEEN_LOOKS = 300.0, 0.2
TURNS = 4
MODES: Mapping[str, Sequence[str]] = {
    "while_training": (),
    "training_first": ("device.serving_share=0.3", "device.engine_share=0.3"),
    "latency_target": ("device.serving_latency_target=1.2",),
}
"""Overrides of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    alone: Traffic
    paused: Traffic
    """Of the process that trains, while training is paused: unlike `alone` it computes an adapter."""
    traffic: Traffic
    steps: int
    """Steps that were trained meanwhile."""
    updates_per_minute: float
    updates_per_minute_alone: float
    """Before there were clients."""


@measurement(
    {
        "serving.itl_p50_ratio_while_training": Bar(max=2),
        "serving.itl_p99_ratio_while_training": Bar(),
        "serving.tokens_ratio_while_training": Bar(),
        "serving.updates_per_minute_while_training": Bar(),
        "serving.updates_ratio_while_training": Bar(min=0.15),
        "serving.itl_p50_ratio_training_first": Bar(),
        "serving.itl_p50_ratio_latency_target": Bar(max=1.3),
        "serving.tokens_ratio_latency_target": Bar(min=0.75),
        "serving.itl_p50_ratio_to_paused_latency_target": Bar(max=1.3),
        "serving.tokens_ratio_to_paused_latency_target": Bar(min=0.75),
        "serving.tokens_ratio_training_first": Bar(),
        "serving.updates_per_minute_training_first": Bar(),
        "serving.steps_while_training": Bar(min=1),
        "serving.errors_while_training": Bar(max=0),
    },
    minutes=16,
)
def serving(request: Request) -> Figures:
    """8 streams while the process trains, over one that only serves: time between tokens, tokens/s, updates a minute.

    With the default shares, with training first, and with a latency target. A step trains on two problems, so that
    several fall into the time. Both processes serve in turns, while the other has no clients and training is paused:
    what the machine does besides meets both. A latency target is a promise about the same process, so that is compared
    with itself, too, in a turn with training paused.
    """
    seconds = request.size(100, 8)
    with tempfile.TemporaryDirectory() as name:
        found = {mode: asyncio.run(serve_and_train(request, mode, Path(name), seconds)) for mode in MODES}
    rows: list[tuple[object, ...]] = []
    for mode, one in found.items():
        paused = [("training paused", *traffic_row(one.paused), "", "")] if one.paused.gaps else []
        rows += [
            ("serving alone", *traffic_row(one.alone), "", ""),
            *paused,
            (mode, *traffic_row(one.traffic), one.updates_per_minute, one.updates_per_minute_alone),
        ]
    header = ("", "tokens/s", "p50 ms", "p99 ms", "first token p50 ms", "updates/min", "without clients")
    print_table("Time between tokens", [header, *rows])
    errors = [
        error for one in found.values() for turns in (one.alone, one.paused, one.traffic) for error in turns.errors
    ]
    print(*(f"  error: {error}" for error in errors[:5]), sep="\n")
    figures: Figures = {
        "serving.steps_while_training": min(one.steps for one in found.values()),
        "serving.errors_while_training": len(errors),
    }
    for mode, one in found.items():
        figures |= {
            f"serving.itl_p50_ratio_{mode}": median(one.traffic.gaps) / median(one.alone.gaps),
            f"serving.itl_p99_ratio_{mode}": p99(one.traffic.gaps) / p99(one.alone.gaps),
            f"serving.tokens_ratio_{mode}": one.traffic.tokens_per_second / one.alone.tokens_per_second,
            f"serving.updates_per_minute_{mode}": one.updates_per_minute,
            f"serving.updates_ratio_{mode}": one.updates_per_minute / one.updates_per_minute_alone,
        }
        if one.paused.gaps:
            figures |= {
                f"serving.itl_p50_ratio_to_paused_{mode}": median(one.traffic.gaps) / median(one.paused.gaps),
                f"serving.tokens_ratio_to_paused_{mode}": one.traffic.tokens_per_second / one.paused.tokens_per_second,
            }
    return figures


def traffic_row(traffic: Traffic) -> tuple[float, ...]:
    times = (median(traffic.gaps), p99(traffic.gaps), median(traffic.first))
    return (traffic.tokens_per_second, *(1e3 * one for one in times))


async def serve_and_train(request: Request, mode: str, folder: Path, seconds: float) -> Measured:
    common = f"model.path={request.model}"
    settings = [
        *(common, "name=bench", *environment_overrides(request.data, NUM_QUESTIONS)),
        *("trainer.steps=1000000", "trainer.evaluate_problems=0", "checkpoint.every=1000000"),
        *("rollout.problems_per_step=2", f"rollout.max_tokens={MAX_TOKENS}"),
        "learner.learning_rate=1e-6",  # answers stay as long as they are without training
        *MODES[mode],
    ]
    alone, paused, beside = Traffic(), Traffic(), Traffic()
    steps, watched = 0, 0.0
    with (
        running("parallm.serve", [common, "name=alone"], folder) as quiet,
        running("parallm.train", settings, folder) as server,
    ):
        await wait_for_first_step(server.url)
        without = await watched_steps(server.url, asyncio.sleep(seconds / 3))
        await pause(server.url)
        for _ in range(TURNS):
            alone.add(await streams(request, quiet.url, seconds / TURNS))
            if mode == "latency_target":
                paused.add(await streams(request, server.url, seconds / TURNS))
            began = time.perf_counter()
            await tell_training(server.url, "resume")
            serving = asyncio.ensure_future(stream_and_pause(request, server.url, seconds / TURNS))
            steps += len(await watched_steps(server.url, serving))
            watched += time.perf_counter() - began
            beside.add(serving.result())
    return Measured(
        alone=alone,
        paused=paused,
        traffic=beside,
        steps=steps,
        updates_per_minute=60 * steps / watched,
        updates_per_minute_alone=per_minute(without, seconds / 3),
    )


async def stream_and_pause(request: Request, url: str, seconds: float) -> Traffic:
    """The traffic; the step under way at its end is finished, too, so that all steps since the last pause are whole."""
    traffic = await streams(request, url, seconds)
    await pause(url)
    return traffic


async def pause(url: str) -> None:
    """Pause training, and return when no step is under way."""
    await tell_training(url, "pause")
    async with asyncio.timeout(SECONDS_TO_FIRST_STEP):
        while (await training_status(url))["state"] != "paused":
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


async def tell_training(url: str, what: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        (await client.post(f"{url}/v1/training/{what}")).raise_for_status()


async def streams(request: Request, url: str, seconds: float) -> Traffic:
    ask = partial(stream_for, url, questions(request.data, NUM_QUESTIONS), clients=CLIENTS, max_tokens=MAX_TOKENS)
    await ask(seconds=min(3.0, seconds))
    return await ask(seconds=seconds)


async def watched_steps(url: str, work: Any) -> list[float]:
    """When each step ended during `work`."""
    times: list[float] = []
    newest, task = await training_step(url), asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        step = await training_step(url)
        times += [time.perf_counter()] * (step - newest)
        newest = step
    return times


def per_minute(times: Sequence[float], seconds: float) -> float:
    """The rate of steps that ended at `times`, within `seconds` of looking."""
    if len(times) < 3:
        return 60 * len(times) / seconds
    return 60 * (len(times) - 1) / (times[-1] - times[0])


async def wait_for_first_step(url: str) -> None:
    async with asyncio.timeout(SECONDS_TO_FIRST_STEP):
        while not await training_step(url):
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


async def training_step(url: str) -> int:
    return int((await training_status(url))["step"])


async def training_status(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        status: dict[str, Any] = (await client.get(f"{url}/v1/training/status")).json()
    return status


@measurement(
    {
        "publish.p50_ms": Bar(),
        "publish.p99_ms": Bar(max=10),
        "publish.pointers_p99_ms": Bar(),
        "publish.failed_requests": Bar(max=0),
    },
    minutes=7,
)
def publish(request: Request) -> Figures:
    """What a publish adds to the next request's first token, while 8 requests decode.

    Between the two lie the publish itself, which moves pointers, and what the engine makes of a version that is new to
    it; that depends on how many other versions decode at that moment.
    """
    return publish_figures(work("publish_speed", model=request.model, data=request.data, repeats=request.size(300, 10)))


def publish_figures(found: Mapping[str, Any]) -> Figures:
    """The p99 of what a publish costs is the difference of the two p99s, but no less than that of the medians: other
    work on the machine moves the former both ways."""
    rows = [(name, median(found[name]), p99(found[name])) for name in ("publish", "to_first_token", "without")]
    print_table(f"{len(found['publish'])} publishes", [("", "p50 ms", "p99 ms"), *rows])
    after, without = found["to_first_token"], found["without"]
    middle = median(after) - median(without)
    return {
        "publish.p50_ms": middle,
        "publish.p99_ms": max(middle, p99(after) - p99(without)),
        "publish.pointers_p99_ms": p99(found["publish"]),
        "publish.failed_requests": found["failed"],
    }


@measurement({"engine.http.vs_bare": Bar(min=0.9, needs="gpu"), "engine.http.vs_bare_every_token": Bar()}, minutes=1.5)
def http(request: Request) -> Figures:
    """Tokens/s of 64 streams over loopback against those of the engine alone, in one process; on a GPU of an 8B shape.

    The clients are a process of their own that reads and counts bytes. With more than 16 streams open, a server sends
    each what it has every `server.coalesce_ms`; that is measured as it comes, and with each token sent at once.
    """
    shape = "tiny" if request.is_quick else "8b" if has_gpu() else None
    streams, max_tokens = request.size(64, 4), request.size(160, 32)
    job = {"model": request.model, "data": request.data, "shape": shape, "streams": streams}
    found = work("http_speed", **job, max_tokens=max_tokens, rounds=request.size(3, 1))
    names = ("engine", "every_token", "coalesced")
    print_table(f"{streams} streams, tokens/s", [("", "median"), *((name, median(found[name])) for name in names)])
    return {
        "engine.http.vs_bare": ratio(found["coalesced"], found["engine"]),
        "engine.http.vs_bare_every_token": ratio(found["every_token"], found["engine"]),
    }
