"""What training costs the clients: time between tokens of streams, and tokens/s, while the process trains and while it
only serves. Once with the shares of the device as they are by default, once with training first. A step trains on few
problems, so that several fall into the time. Beside that what the clients cost the training: updates a minute with them
and, before they come, without.

Also publishes while 8 requests decode, from the asyncio thread, as the trainer does: from the call until the next
request has its first token, which the new version has to have sampled, against requests without a publish before them.
Between the two lie the publish itself, which moves pointers, and what the engine makes of a version that is new to it;
that depends on how many other versions decode at that moment. The p99 of what a publish costs is the difference of the
two p99s, but no less than that of the medians: other work on the machine moves the former both ways.
"""

import asyncio
import math
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from clients import Traffic, stream_for
from job import Job, add_model_options, base_job, blas_name, run_worker
from problems import environment_overrides, load_problems
from report import print_figures, print_table
from server_process import server_process

NUM_QUESTIONS = 64
SECONDS_TO_FIRST_STEP, SECONDS_BETWEEN_LOOKS = 300.0, 0.2
ALONE = "serving alone"
MODES: Mapping[str, Sequence[str]] = {
    "while training": (),
    "training first": ("device.serving_share=0.3", "device.engine_share=0.3"),
}
"""Overrides of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    traffic: Traffic
    steps: int = 0
    """That were trained meanwhile."""
    updates_per_minute: float = 0.0
    updates_per_minute_alone: float = math.inf
    """Before there were clients."""

    @property
    def tokens_per_second(self) -> float:
        return self.traffic.tokens / self.traffic.seconds


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--seconds", type=float, default=120, help="of each kind of traffic (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="streams at the same time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=2, help="of a training step, 8 completions each (%(default)s)")
    parser.add_argument("--publishes", type=int, default=300, help="0: leave them out (default: %(default)s)")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), max_tokens=arguments.max_tokens, prompts=arguments.problems)
    found: dict[str, Measured] = {}
    if arguments.seconds:
        with tempfile.TemporaryDirectory() as folder:
            for name, overrides in {ALONE: None, **MODES}.items():
                streams = measure(overrides, job, Path(folder), arguments.clients, arguments.seconds)
                found[name] = asyncio.run(streams)
        print_traffic(f"{arguments.model}, {arguments.clients} streams, {arguments.seconds:.0f} s", found)
    figures = traffic_figures(found) if found else {}
    if arguments.publishes:
        figures |= publish_figures(run_worker("publish_speed", replace(job, repeats=arguments.publishes)))
    print_figures(figures, device=blas_name(job))


async def measure(overrides: Sequence[str] | None, job: Job, folder: Path, clients: int, seconds: float) -> Measured:
    """Train with these overrides, or only serve; let the clients stream meanwhile."""
    trains = overrides is not None
    settings = [f"model.path={job.model}", f"device.blas={job.blas}", "name=bench", *(overrides or ())]
    if trains:
        settings += environment_overrides(job.data, NUM_QUESTIONS)
        settings += ["trainer.steps=1000000", "trainer.evaluate_problems=0", "checkpoint.every=1000000"]
        settings += [f"rollout.problems_per_step={job.prompts}", f"rollout.max_tokens={job.max_tokens}"]
        settings += ["learner.learning_rate=1e-6"]  # so that answers stay as long as they are without training
    questions = [problem.messages[-1].content for problem in load_problems(job.data, NUM_QUESTIONS)]
    with server_process("parallm.train" if trains else "parallm.serve", settings, folder) as url:
        streams = partial(stream_for, url, questions, clients=clients, max_tokens=job.max_tokens)
        if not trains:
            await streams(seconds=min(3.0, seconds))
            return Measured(traffic=await streams(seconds=seconds))
        await wait_for_step(url, 1)
        alone = asyncio.create_task(step_times(url))
        await asyncio.sleep(seconds / 3)
        alone.cancel()
        await streams(seconds=min(3.0, seconds))
        meanwhile = asyncio.create_task(step_times(url))
        first = await training_step(url)
        traffic = await streams(seconds=seconds)
        meanwhile.cancel()
        return Measured(
            traffic=traffic,
            steps=await training_step(url) - first,
            updates_per_minute=per_minute(await meanwhile, traffic.seconds),
            updates_per_minute_alone=per_minute(await alone, seconds / 3),
        )


async def step_times(url: str) -> list[float]:
    """When each step ended, until this is cancelled."""
    times: list[float] = []
    newest = await training_step(url)
    try:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if (step := await training_step(url)) > newest:
                times += [time.perf_counter()] * (step - newest)
                newest = step
    except asyncio.CancelledError:
        return times


def per_minute(times: Sequence[float], seconds: float) -> float:
    """Of steps that ended at `times`, within `seconds` of looking."""
    if len(times) < 3:
        return 60 * len(times) / seconds
    return 60 * (len(times) - 1) / (times[-1] - times[0])


async def wait_for_step(url: str, step: int) -> int:
    for _ in range(int(SECONDS_TO_FIRST_STEP / SECONDS_BETWEEN_LOOKS)):
        found = await training_step(url)
        if found >= step:
            return found
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    raise RuntimeError(f"no training step within {SECONDS_TO_FIRST_STEP:.0f} s")


async def training_step(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return int((await client.get(f"{url}/v1/training/status")).json()["step"])


def print_traffic(title: str, found: Mapping[str, Measured]) -> None:
    header = ("", "requests", "tokens/s", "p50 ms", "p99 ms", "first token p50 ms", "errors", "updates/min", "alone")
    rows = [header, *(traffic_row(name, one) for name, one in found.items())]
    print_table(f"Time between tokens: {title}", rows)
    for error in [error for one in found.values() for error in one.traffic.errors][:5]:
        print(f"  error: {error}")


def traffic_row(name: str, one: Measured) -> tuple[str, ...]:
    times = (median(one.traffic.gaps), p99(one.traffic.gaps), median(one.traffic.first))
    return (
        name,
        str(one.traffic.finished),
        f"{one.tokens_per_second:.0f}",
        *(f"{1e3 * seconds:.1f}" for seconds in times),
        str(len(one.traffic.errors)),
        f"{one.updates_per_minute:.1f}",
        f"{one.updates_per_minute_alone:.1f}" if one.steps else "",
    )


def traffic_figures(found: Mapping[str, Measured]) -> dict[str, float | None]:
    alone, training = found[ALONE], found["while training"]
    figures: dict[str, float | None] = {
        "serving.itl_p50_ms_alone": 1e3 * median(alone.traffic.gaps),
        "serving.itl_p50_ms_while_training": 1e3 * median(training.traffic.gaps),
        "serving.errors_while_training": sum(len(found[name].traffic.errors) for name in MODES),
        "serving.steps_while_training": min(found[name].steps for name in MODES),
    }
    for name in MODES:
        suffix, one = name.replace(" ", "_"), found[name]
        figures |= {
            f"serving.itl_p50_ratio_{suffix}": median(one.traffic.gaps) / median(alone.traffic.gaps),
            f"serving.itl_p99_ratio_{suffix}": p99(one.traffic.gaps) / p99(alone.traffic.gaps),
            f"serving.tokens_ratio_{suffix}": one.tokens_per_second / alone.tokens_per_second,
            f"serving.updates_per_minute_{suffix}": one.updates_per_minute,
            f"serving.updates_ratio_{suffix}": one.updates_per_minute / one.updates_per_minute_alone,
        }
    return figures


def publish_figures(found: dict[str, Any]) -> dict[str, float | None]:
    """Also prints the table of publishes."""
    rows = [("", "p50 ms", "p99 ms", "largest ms")]
    for name, what in (
        ("publish", "publish"),
        ("publish until the next request's first token", "to_first_token"),
        ("a request's first token without a publish before it", "without"),
    ):
        times = found[what]
        rows.append((name, f"{median(times):.3f}", f"{p99(times):.3f}", f"{max(times):.3f}"))
    requests = f"{found['finished']} requests finished, {found['failed']} failed, {found['tokens']} tokens"
    print_table(f"{len(found['publish'])} publishes while 8 requests decode ({requests})", rows)
    behind, without = found["to_first_token"], found["without"]
    middle = median(behind) - median(without)
    return {
        "publish.p50_ms": middle,
        "publish.p99_ms": max(middle, p99(behind) - p99(without)),
        "publish.pointers_p99_ms": p99(found["publish"]),
        "publish.failed_requests": found["failed"],
    }


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    main()
