"""A server on another GPU as a rollout engine of a trainer: how much faster it samples, and what its log-probs are."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import print_table
from bench.measure.workers import Job
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import metrics, running, train, work
from parallm.distributed.launcher import devices


@measurement(
    {
        "replicas.sampling_speedup": Bar(),
        "replicas.step_speedup": Bar(),
        "replicas.ahead_speedup": Bar(),
        "replicas.k3": Bar(max=1e-4, needs="gpus2"),
    },
    minutes=2,
    needs="gpus2",
    is_quick_anywhere=True,
)
def rollout_engines(request: Request) -> Iterator[Figures]:
    """0.5B, 256 rows x 256 tokens, 128 rows at a time on each GPU: seconds of sampling, and of a step, of a trainer
    alone over those with a server beside it, and with the server alone sampling one step ahead."""
    job = Job(shape="0.5b", rows=256, tokens=256, steps=6, most_rows=128)
    if request.is_quick:
        job = Job(shape="tiny", rows=32, tokens=16, steps=2, warm_up=1, most_rows=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work("random_folder", shape=job.shape, folder=str(folder / "model"))
        model = f"model.path={folder / 'model'}"
        serving = [model, f"engine.max_rows={job.most_rows}", "server.state=off"]
        second = {"CUDA_VISIBLE_DEVICES": gpus[1]} if len(gpus := devices()) > 1 else {}

        def run(title: str, *overrides: str) -> list[dict[str, Any]]:
            train(folder / title / "run", model, *job.overrides(job.rows), *overrides)
            rows = metrics(folder / title / "run")[job.warm_up :]
            names = ("seconds/total", "seconds/rollout", "seconds/update", "rollout/tokens_per_second")
            print_table(title, [names, *(tuple(row[name] for name in names) for row in rows)])
            return rows

        with running("parallm.serve", serving, folder, second) as server:
            alone = run("alone")
            both = run("both", f"rollout.engines=[local,{server.url}]")
            yield {
                "replicas.sampling_speedup": ratio(alone, both, "seconds/rollout"),
                "replicas.step_speedup": ratio(alone, both, "seconds/total"),
                "replicas.k3": max(row[f"engines/{server.url.partition('//')[2]}/k3"] for row in both),
            }
            ahead = run("ahead", f"rollout.engines=[{server.url}]", "trainer.max_off_policy_steps=1")
            yield {"replicas.ahead_speedup": ratio(alone, ahead, "seconds/total")}


def ratio(one: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> float:
    return median(row[name] for row in one) / median(row[name] for row in other)
