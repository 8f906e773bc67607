"""A training run on ragged lengths: seconds a step, and the age of every token that the learner was given."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

import bench
from bench.processes import metrics
from parallm.config.schema import RunConfig
from parallm.learner.learner import Learner
from parallm.reports import UpdateReport
from parallm.run.train import run_training
from parallm.types import TrajectoryGroup

TEMPERATURE = 2.6
"""Lengths depend on the embedded model's end token alone: at this temperature half of the completions have at most 20
tokens, a tenth more than 50, one in a hundred more than 115. That is close to a log-normal distribution."""
WARM_UP = 2
"""First steps, which fill the pipeline."""

update = Learner.update
lags: list[int] = []


def watched(
    self: Learner, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int
) -> Iterator[UpdateReport | None]:
    """`Learner.update`, noting versions independently of what the trainer says about itself."""
    trajectories = [one for group in groups for one in group.trajectories]
    lags.extend(self.adapter.version - span.version for one in trajectories for span in one.weight_versions)
    return update(self, groups, step=step, max_tokens=max_tokens)


def main(
    *, model: str, prompts: int, group_size: int, max_tokens: int, steps: int, ahead: int, switches: bool = False
) -> dict[str, Any]:
    """`ahead` is trainer.max_off_policy_steps."""
    Learner.update = watched  # type: ignore[method-assign]
    config = TypeAdapter(RunConfig).validate_python(
        {
            "model": {"path": model},
            "environment": {"name": "custom", "target": "bench.problems:Ragged"},
            "rollout": {
                "problems_per_step": prompts,
                "group_size": group_size,
                "max_tokens": max_tokens,
                "temperature": TEMPERATURE,
                "switch_in_flight": switches,
            },
            "engine": {"max_rows": 128},
            "learner": {"learning_rate": 1e-5},  # so that lengths stay as they are
            "trainer": {"steps": steps, "max_off_policy_steps": ahead, "evaluate_problems": 0},
            "checkpoint": {"every": steps},
            "metrics": {"display": "off"},
            "server": {"enabled": False},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run_training(config, Path(folder), bench.BLAS)
        rows = metrics(Path(folder))
    # the last steps sample nothing ahead: steps would count for which others have sampled
    timed = rows[WARM_UP : len(rows) - ahead]
    return {
        "seconds": fmean(row["seconds/total"] for row in timed),
        "max_lag": max(lags),
        "mean_lag": fmean(row["offpolicy/lag_mean"] for row in timed),
        "dropped": sum(row["offpolicy/dropped"] for row in rows),
    }
