"""Seconds and peak memory of our GRPO steps on random weights: `python -m parallm.train` in this process."""

import json
import sys
import tempfile
from pathlib import Path

from number_words import NumberWords
from shapes import SHAPES, GrpoJob, read_grpo_job

from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command
from parallm.train import run


def arguments(job: GrpoJob, folder: str) -> list[str]:
    steps = job.warm_up + job.steps
    return [
        *(f"model.path={job.model}", "model.lora.rank=16", f"trainer.steps={steps}", "trainer.evaluate_problems=0"),
        *("environment=custom", "environment.target=number_words:NumberWords"),
        *(f"environment.options.count={steps * job.prompts}", f"environment.options.length={job.prompt}"),
        f"environment.options.vocabulary={SHAPES[job.shape].vocabulary}",
        *(f"rollout.problems_per_step={job.prompts}", f"rollout.group_size={job.group_size}"),
        *(f"rollout.max_tokens={job.completion}", "rollout.refill_rounds=0"),
        *(f"engine.max_rows={job.completions}", "learner.learning_rate=1e-6"),
        f"learner.micro_batch_tokens={job.rows * (job.prompt + job.completion)}",
        *("server=off", "name=bench", "metrics.display=off", "checkpoint.every=1000", f"hydra.run.dir={folder}"),
    ]


def main(job: GrpoJob) -> None:
    peak = None

    def measured(config: RunConfig, folder: Path, blas: BlasReport) -> int:
        nonlocal peak
        import mlx.core as mx  # noqa: PLC0415  # not at the top: the command loads the BLAS before MLX

        code = run(config, folder, blas)
        peak = None if mx.default_device() == mx.Device(mx.cpu) else mx.get_peak_memory() / 1e9
        return code

    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = arguments(job, folder)
        if code := run_command("train", measured):
            sys.exit(code)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    scoring = [sum(NumberWords.score_seconds[place : place + job.completions]) for place in starts(job)]
    found = {
        "seconds": [row["seconds/total"] for row in rows],
        "sampling": [row["seconds/rollout"] - spent for row, spent in zip(rows, scoring, strict=True)],
        "scoring": scoring,
        "update": [row["seconds/update"] for row in rows],
        "sampled_tokens": [row["rollout/tokens"] for row in rows],
        "trained_tokens": [row["update/tokens"] for row in rows],
    }
    print(json.dumps({name: values[job.warm_up :] for name, values in found.items()} | {"peak_gb": peak}))


def starts(job: GrpoJob) -> range:
    """Where each step's first score stands among all."""
    return range(0, (job.warm_up + job.steps) * job.completions, job.completions)


main(read_grpo_job(sys.argv[1]))
