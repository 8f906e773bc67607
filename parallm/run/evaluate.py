"""The wiring of `parallm.evaluate`: compares adapters and the base on held-out problems."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallm.checkpoint.adapter_paths import find_adapters
from parallm.config.run_folder import check_writable
from parallm.config.schema import EvaluateConfig
from parallm.device.blas import BlasReport
from parallm.environment.environment import connect
from parallm.errors import CheckpointError, ConfigError, ProblemError
from parallm.learner.settings import LearnerSettings
from parallm.metrics.comparison import Compared, comparison_report, print_comparison
from parallm.metrics.display import evaluation_line
from parallm.metrics.eta import ThrottledProgress
from parallm.metrics.formatting import short_path
from parallm.metrics.json_lines import JsonLines, to_json, write_whole
from parallm.metrics.machine import describe_commit, describe_machine
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter
from parallm.model.adapters.reward_head import refuse_head
from parallm.model.load import check_local
from parallm.model.settings import ModelSettings
from parallm.rollout.confidence_intervals import share_difference
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.judge import Judge
from parallm.run.runtime import Runtime, RuntimeSettings, on_device, open_runtime
from parallm.run.training_data import build_environment
from parallm.trainer.evaluators import evaluation_samples
from parallm.trainer.reward_training import find_reward_model, open_reward_model
from parallm.types import BASE

REPORT = "evaluation.json"
COMPLETIONS = "completions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model to evaluate."""

    name: str
    """Name for people: the adapter's folder, or `base`."""
    model: str
    """Name in requests."""
    version: int = 0
    step: int = 0


def run_evaluation(config: EvaluateConfig, folder: Path, blas: BlasReport) -> int:
    """Evaluate, print the table and write evaluation.json. Returns the exit code; raises ParallmError."""
    asyncio.run(_evaluate(config, folder, blas))
    return 0


async def _evaluate(config: EvaluateConfig, folder: Path, blas: BlasReport) -> None:
    named = (config.model.adapter, *config.adapters) if config.model.adapter is not None else config.adapters
    adapters = dict.fromkeys(path for name in named for path in find_adapters(name))
    if not adapters and not config.base:
        raise ConfigError("base=false leaves nothing to evaluate; name an adapter with model.adapter=FOLDER")
    check_local(config.model.path)
    find_reward_model(config.rollout.reward_model)
    check_writable(folder)
    environment = build_environment(config.environment)
    problems = environment.problems("test")[: config.trainer.evaluate_problems]
    if not config.trainer.evaluate_problems:
        raise ConfigError("trainer.evaluate_problems=0 leaves nothing to evaluate on; 512 is the default")
    if not problems:
        raise ProblemError(f"environment={config.environment.name}: the test split has no problems")
    # adapters are read one by one: each may have its own rank and targets
    model = ModelSettings(path=config.model.path, dtype=config.model.dtype, quantized=config.model.quantized)
    async with open_runtime(RuntimeSettings(model=model, engine=config.engine, needs_text=True), blas) as runtime:
        candidates = [Candidate(name=BASE, model=BASE)] if config.base else []
        for path in adapters:
            candidates.append(await _publish(runtime, path, f"candidate-{len(candidates)}"))
        connect(environment, Judge(runtime.engine.generate, runtime.model.tokenizer))
        reward_model = await open_reward_model(
            config.rollout.reward_model, LearnerSettings(), runtime.device, runtime.model, runtime.streams
        )
        evaluator = Evaluator(
            generate=runtime.engine.completions,
            tokenizer=runtime.model.tokenizer,
            environment=environment,
            problems=problems,
            samples=evaluation_samples(config.trainer, config.seed),
            rollout=config.rollout,
            reward_model=reward_model,
        )
        compared = await _compare(evaluator, candidates, JsonLines(folder / COMPLETIONS))
    print_comparison(compared, sys.stdout)
    _write(config, folder / REPORT, compared)
    sys.stdout.write(f"completions: {short_path(folder / COMPLETIONS)}\n")


async def _publish(runtime: Runtime, folder: Path, name: str) -> Candidate:
    """Read an adapter and publish it. Raises AdapterError if it does not fit the base."""

    def publish() -> Adapter:
        adapter = read_adapter(folder, runtime.model.targets, model_type=runtime.model.model_type, name=name)
        refuse_head(adapter, str(folder), "its run's evaluations.jsonl says how well it tells pairs apart")
        runtime.adapters.publish(adapter)
        return adapter

    adapter = await on_device(runtime.device, publish)
    shown = folder.parent if folder.name == "adapter" else folder
    return Candidate(name=str(shown), model=name, version=adapter.version, step=adapter.step)


async def _compare(evaluator: Evaluator, candidates: Sequence[Candidate], file: JsonLines) -> list[Compared]:
    """Evaluate one after the other, write completions to `file` and progress to standard error."""
    compared: list[Compared] = []
    first: list[bool] | None = None
    for candidate in candidates:
        began = time.perf_counter()
        outcomes = await evaluator.outcomes(
            candidate.model, partial(_say_progress, candidate.name, ThrottledProgress())
        )
        report = evaluator.report(outcomes, candidate.step, candidate.version)
        correct = [completion.is_correct for completion in outcomes.greedy]
        sys.stderr.write(f"{candidate.name}: {evaluation_line(report)}\n")
        origin = {"step": candidate.step, "model": candidate.name}
        file.append(*({**origin, **dataclasses.asdict(completion)} for completion in outcomes.completions))
        compared.append(
            Compared(
                name=candidate.name,
                is_base=candidate.model == BASE,
                report=report,
                difference=None if first is None else share_difference(correct, first),
                seconds=time.perf_counter() - began,
            )
        )
        first = first or correct
    return compared


def _say_progress(name: str, seldom: ThrottledProgress, done: int, total: int) -> None:
    if text := seldom.text(done, total):
        sys.stderr.write(f"{name}: {text} completions\n")


def _write(config: EvaluateConfig, path: Path, compared: Sequence[Compared]) -> None:
    settings = {
        "base_model": config.model.path,
        "environment": dataclasses.asdict(config.environment),
        "max_tokens": config.rollout.max_tokens,
        "seed": config.seed,
        "machine": describe_machine(),
        "commit": describe_commit(),
    }
    try:
        write_whole(path, to_json(comparison_report(compared, settings), indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}; the table above holds the same numbers"
        ) from error
    sys.stdout.write(f"report: {short_path(path)}\n")
