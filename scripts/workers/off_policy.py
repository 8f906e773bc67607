"""A training run on ragged lengths: seconds per step, and the age of every token that the learner was given."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from job import Job, read_job
from pydantic import TypeAdapter

from parallm.config.schema import RunConfig
from parallm.device.blas import load_blas
from parallm.learner.learner import Learner
from parallm.reports import UpdateReport
from parallm.run.train import run_training
from parallm.types import TrajectoryGroup

TEMPERATURE = 2.6
"""Of the embedded model. Nothing shapes the lengths but its own end token: half of the completions then have at most 20
tokens, a tenth more than 50, one in a hundred more than 115. That is close to a log-normal distribution with a sigma of
0.75, and the longest of 64 is seven times as long as the median."""
WARM_UP = 2
"""Steps that are left out: the first ones fill the pipeline."""

update = Learner.update
lags: list[int] = []
lengths: list[int] = []
cpu_seconds: list[float] = []
"""Of this process, before each update."""


def watched(
    self: Learner, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int
) -> Iterator[UpdateReport | None]:
    """`Learner.update`, noting versions where they count: independent of what the trainer says about itself."""
    cpu_seconds.append(time.process_time())
    trajectories = [one for group in groups for one in group.trajectories]
    lags.extend(self.adapter.version - span.version for one in trajectories for span in one.weight_versions)
    lengths.extend(len(one.tokens) for one in trajectories)
    return update(self, groups, step=step, max_tokens=max_tokens)


def measure(job: Job) -> dict[str, Any]:
    Learner.update = watched  # type: ignore[method-assign]
    config = TypeAdapter(RunConfig).validate_python(
        {
            "model": {"path": job.model},
            "environment": {"name": "custom", "target": "ragged:Ragged"},
            "rollout": {
                "problems_per_step": job.prompts,
                "group_size": job.group_size,
                "max_tokens": job.max_tokens,
                "temperature": TEMPERATURE,
                "switch_in_flight": job.switches,
            },
            "engine": {"max_rows": job.rows},
            "learner": {"learning_rate": 1e-5},  # so that lengths stay as they are
            "trainer": {"steps": job.steps, "max_off_policy_steps": job.ahead, "evaluate_problems": 0},
            "checkpoint": {"every": job.steps},
            "metrics": {"display": "off"},
            "server": {"enabled": False},
            "seed": job.seed,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run_training(config, Path(folder), load_blas(job.device))
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    # The last steps sample nothing ahead: with them, steps would be counted for which others have sampled
    timed = slice(WARM_UP, len(rows) - job.ahead)
    hundredths = quantiles(lengths, n=100)
    cpu = [after - before for before, after in pairwise(cpu_seconds)]
    return {
        "seconds_per_step": fmean(row["seconds/total"] for row in rows[timed]),
        "cpu_seconds_per_step": fmean(cpu[timed]),
        "update_seconds": fmean(row["seconds/update"] for row in rows[timed]),
        "tokens_per_step": fmean(row["rollout/tokens"] for row in rows[timed]),
        "max_lag": max(lags),
        "mean_lag": fmean(row["offpolicy/lag_mean"] for row in rows[timed]),
        "dropped": sum(row["offpolicy/dropped"] for row in rows),
        "lengths": [hundredths[49], hundredths[89], hundredths[98], max(lengths)],
        "steps": len(rows),
    }


print(json.dumps(measure(read_job(sys.argv[1]))))
