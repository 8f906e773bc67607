"""What training costs the clients: time between tokens of streams while the process trains, and while it only serves.

Also 1,000 publishes while 8 requests decode, from the asyncio thread, as the trainer does: from the call until the next
request gets the new version.
"""

import asyncio
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
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
SECONDS_TO_FIRST_STEP = 300.0


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--seconds", type=float, default=120, help="of each kind of traffic (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="streams at the same time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument("--publishes", type=int, default=1000, help="0: leave them out (default: %(default)s)")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), max_tokens=arguments.max_tokens, prompts=16)
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = asyncio.run(measure("parallm.serve", job, Path(folder), arguments.clients, arguments.seconds))
        training, steps = asyncio.run(measure("parallm.train", job, Path(folder), arguments.clients, arguments.seconds))
    rows: list[tuple[str, ...]] = [
        ("", "requests", "p50 ms", "p99 ms", "first token p50 ms", "errors", "steps trained")
    ]
    rows += [traffic_row("serving alone", alone, 0), traffic_row("while training", training, steps)]
    print_table(f"Time between tokens: {arguments.model}, {arguments.clients} streams, {arguments.seconds:.0f} s", rows)
    for error in (alone.errors + training.errors)[:5]:
        print(f"  error: {error}")
    figures: dict[str, float | None] = {
        "serving.itl_p50_ms_alone": 1e3 * median(alone.gaps),
        "serving.itl_p50_ms_while_training": 1e3 * median(training.gaps),
        "serving.itl_p50_ratio_while_training": median(training.gaps) / median(alone.gaps),
        "serving.itl_p99_ratio_while_training": p99(training.gaps) / p99(alone.gaps),
        "serving.errors_while_training": len(training.errors),
        "serving.steps_while_training": steps,
    }
    if arguments.publishes:
        figures |= publish_figures(run_worker("publish_speed", replace(job, repeats=arguments.publishes)))
    print_figures(figures, device=blas_name(job))


async def measure(program: str, job: Job, folder: Path, clients: int, seconds: float) -> tuple[Traffic, float]:
    """Run the program, let the clients stream, and return what they saw and how many steps were trained meanwhile."""
    trains = program == "parallm.train"
    overrides = [f"model.path={job.model}", f"device.blas={job.blas}", "name=bench"]
    if trains:
        overrides += environment_overrides(job.data, NUM_QUESTIONS)
        overrides += ["trainer.steps=1000000", "trainer.evaluate_problems=0", "checkpoint.every=1000000"]
        overrides += [f"rollout.problems_per_step={job.prompts}", f"rollout.max_tokens={job.max_tokens}"]
        overrides += ["learner.learning_rate=1e-6"]  # so that answers stay as long as they are without training
    questions = [problem.messages[-1].content for problem in load_problems(job.data, NUM_QUESTIONS)]
    with server_process(program, overrides, folder) as url:
        first = await wait_for_step(url, 1) if trains else 0
        await stream_for(url, questions, clients=clients, seconds=min(3.0, seconds), max_tokens=job.max_tokens)
        found = await stream_for(url, questions, clients=clients, seconds=seconds, max_tokens=job.max_tokens)
        return found, training_step(url) - first if trains else 0


async def wait_for_step(url: str, step: int) -> int:
    for _ in range(int(SECONDS_TO_FIRST_STEP / 0.2)):
        found = training_step(url)
        if found >= step:
            return found
        await asyncio.sleep(0.2)
    raise RuntimeError(f"no training step within {SECONDS_TO_FIRST_STEP:.0f} s")


def training_step(url: str) -> int:
    return int(httpx.get(f"{url}/v1/training/status", trust_env=False, timeout=30).json()["step"])


def publish_figures(found: dict[str, Any]) -> dict[str, float | None]:
    """Also prints the table of publishes."""
    rows = [("", "p50 ms", "p99 ms", "largest ms")]
    times = found["publish"]
    rows.append(("publish", f"{median(times):.3f}", f"{p99(times):.3f}", f"{max(times):.3f}"))
    requests = f"{found['finished']} requests finished, {found['failed']} failed, {found['tokens']} tokens"
    print_table(f"{len(found['publish'])} publishes while 8 requests decode ({requests})", rows)
    return {
        "publish.p99_ms": p99(found["publish"]),
        "publish.failed_requests": found["failed"],
    }


def traffic_row(name: str, traffic: Traffic, steps: float) -> tuple[str, ...]:
    return (
        name,
        str(traffic.finished),
        f"{1e3 * median(traffic.gaps):.1f}",
        f"{1e3 * p99(traffic.gaps):.1f}",
        f"{1e3 * median(traffic.first):.1f}",
        str(len(traffic.errors)),
        str(steps),
    )


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    main()
