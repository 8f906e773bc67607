"""Seconds and peak memory of our GRPO steps on random weights: `python -m parallm.train` in this process."""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.processes import metrics
from bench.workers.loads import limits_of_step
from bench.workers.number_words import NumberWords
from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command
from parallm.types import GenerationRequest

ID_IN_STEP = re.compile(r"step-(\d+)-(\d+)-")
"""Of a request: the step, and its place among the step's problems."""


def arguments(model: str, vocabulary: int, sizes: dict[str, int], steps: int, folder: str) -> list[str]:
    length = sizes["prompt"] + sizes["completion"]
    return [
        *(f"model.path={model}", "model.lora.rank=16", f"trainer.steps={steps}", "trainer.evaluate_problems=0"),
        *("environment=custom", "environment.target=bench.workers.number_words:NumberWords"),
        *(f"environment.options.count={steps * sizes['prompts']}", f"environment.options.length={sizes['prompt']}"),
        f"environment.options.vocabulary={vocabulary}",
        *(f"rollout.problems_per_step={sizes['prompts']}", f"rollout.group_size={sizes['group_size']}"),
        *(f"rollout.max_tokens={sizes['completion']}", "rollout.refill_rounds=0"),
        *(f"engine.max_rows={sizes['prompts'] * sizes['group_size']}", "learner.learning_rate=1e-6"),
        *([f"learner.micro_batch_tokens={sizes['rows'] * length}"] if "rows" in sizes else []),
        *("server=off", "name=bench", "metrics.display=off", "checkpoint.every=1000", f"hydra.run.dir={folder}"),
    ]


def main(
    *, model: str, vocabulary: int, warm_up: int, steps: int, shortest: int | None = None, **sizes: int
) -> dict[str, Any]:
    """`sizes`: prompts, group_size, prompt and completion in tokens, and rows of a training pass, by default as many as
    the learner takes. Completions are as long as `completion`; with `shortest`, each has a limit of its own."""
    peak, completions = None, sizes["prompts"] * sizes["group_size"]

    def measured(config: RunConfig, folder: Path, blas: BlasReport) -> int:
        nonlocal peak
        import mlx.core as mx  # noqa: PLC0415  # not at the top: the command loads the BLAS before MLX

        from parallm.run.train import run_training  # noqa: PLC0415

        if shortest is not None:
            limit_completions(sizes["group_size"], completions, (shortest, sizes["completion"]))
        code = run_training(config, folder, blas)
        peak = None if mx.default_device() == mx.Device(mx.cpu) else mx.get_peak_memory() / 1e9
        return code

    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = arguments(model, vocabulary, sizes, warm_up + steps, folder)
        if code := run_command("train", measured):
            sys.exit(code)
        rows = metrics(Path(folder))
    firsts = range(0, len(rows) * completions, completions)
    scoring = [sum(NumberWords.score_seconds[first : first + completions]) for first in firsts]
    times = {
        "seconds": [row["seconds/total"] for row in rows],
        "sampling": [row["seconds/rollout"] - spent for row, spent in zip(rows, scoring, strict=True)],
        "scoring": scoring,
        "update": [row["seconds/update"] for row in rows],
        "sampled_tokens": [row["rollout/tokens"] for row in rows],
    }
    return {name: values[warm_up:] for name, values in times.items()} | {"peak_gb": peak}


def limit_completions(group_size: int, rows: int, bounds: tuple[int, int]) -> None:
    """Let each completion of a step end at its limit; the engine does not know it before, as with an end token."""
    from parallm.engine import engine  # noqa: PLC0415  # not at the top, as above

    make = engine.make_sequences

    def limited(request: GenerationRequest, *arguments: Any, **options: Any) -> Any:
        sequences = make(request, *arguments, **options)
        if found := ID_IN_STEP.match(request.request_id):
            step, place = map(int, found.groups())
            limits = limits_of_step(step, rows, bounds)
            for sequence in sequences:
                sequence.max_tokens = limits[place * group_size + sequence.index]
        return sequences

    engine.make_sequences = limited
