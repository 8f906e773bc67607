"""Trains fine-tuning jobs on a running model: what `run/train.py` opens for a process, opened for one job.

A job has a run folder of its own. It trains on the one base as a further policy does: a trainer takes rollouts from the
same engine and its updates go through the same device thread, so the governor divides the device as ever.
"""

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.checkpoint.format import read_version
from parallm.checkpoint.manager import CheckpointManager, checkpoint_folders
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.config.schema import RunConfig, ServeConfig, with_parts
from parallm.device.memory import release_memory
from parallm.device.settings import DeviceSettings
from parallm.distributed.parts import Single
from parallm.environment.environment import AnyEnvironment, connect
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import AdapterError, ConfigError, ModelError, UnknownModel
from parallm.jobs.fine_tuning import HELD_OUT, START, TRAIN, TuningOrder, TuningResult
from parallm.jobs.graders import EnvironmentGrader, read_grader
from parallm.jobs.job_rows import JobListener, SavedVersion
from parallm.jobs.plan import Plan, TuningRequest, Usual, make_plan
from parallm.jobs.settings import JobSettings
from parallm.jobs.training_files import GradedProblems, read_problems
from parallm.learner.kernel_list import learner_kernels
from parallm.metrics.display import Display
from parallm.metrics.json_lines import read_rows
from parallm.metrics.record import RunRecorder
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics, evaluation_row
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter, write_exactly
from parallm.model.adapters.initial import starting_adapter
from parallm.model.adapters.names import of_alias
from parallm.model.adapters.reward_head import refuse_head
from parallm.model.kernels.cuda import has_kernels, target
from parallm.model.kernels.preparation import prepare_kernels
from parallm.reports import EvaluatedCompletion, EvaluationReport
from parallm.rollout.judge import Judge
from parallm.run.build_trainer import build_policy_run
from parallm.run.policy_runs import PolicySpec
from parallm.run.runtime import Runtime, on_device
from parallm.run.training_data import TrainingData, read_training_data
from parallm.types import BASE, TrajectoryGroup

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

logger = logging.getLogger(__name__)


def usual_config(config: ServeConfig) -> RunConfig:
    """Return what jobs have before a client says anything. Raises ConfigError for wrong keys in `jobs.training`."""
    run = RunConfig(
        model=dataclasses.replace(config.model, adapter=None),
        engine=config.engine,
        device=DeviceSettings(
            serving_share=config.device.serving_share, serving_latency_target=config.device.serving_latency_target
        ),
        metrics=MetricsSettings(display="off", curves=False),
    )
    try:
        return with_parts(run, {str(part): keys for part, keys in config.jobs.training.items()})
    except ConfigError as error:
        raise ConfigError("\n".join(f"jobs.training.{line}" for line in str(error).splitlines())) from error


class JobTrainer:
    """Trains one job after the other on a runtime. The `Train` of `FineTuning`."""

    def __init__(self, runtime: Runtime, usual: RunConfig, settings: JobSettings) -> None:
        self._runtime = runtime
        self._usual = usual
        self._settings = settings

    async def __call__(self, order: TuningOrder) -> TuningResult:
        """Train, or go on with what is in the order's folder. Raises ParallmError."""
        try:
            return await self._train(order)
        finally:
            await asyncio.to_thread(gc.collect)  # learner, trainer and optimizer refer to each other
            await on_device(self._runtime.device, release_memory)

    async def restore(self, models: Sequence[tuple[str, Path]]) -> None:
        """Serve what jobs of earlier processes have made, but for names that operators have changed since."""
        for name, folder in models:
            if name not in self._runtime.kept.state.highest:
                try:
                    await self._pin(name, folder, serve=True)
                except AdapterError as error:
                    logger.error("%s is not served: %s", name, error)

    def unload(self, name: str) -> None:
        with suppress(UnknownModel):
            self._runtime.adapters.unload(name)

    async def _train(self, order: TuningOrder) -> TuningResult:
        runtime, adapters = self._runtime, self._runtime.adapters
        self._check(order)
        start = await self._start(order)
        config, data, plan = await asyncio.to_thread(_prepare, order, self._usual, self._settings, start is not None)
        order.listener.planned(plan)
        adapter = await on_device(runtime.device, partial(starting_adapter, config.model, runtime.model, config.seed))
        refuse_head(adapter, order.request.model, "train an adapter that writes text")
        adapter = dataclasses.replace(adapter, name=order.name, version=max(1, adapter.version))
        if has_kernels():
            needed = await on_device(runtime.device, partial(learner_kernels, runtime.model, adapter))
            await asyncio.to_thread(prepare_kernels, needed, target(), lambda done, total: None)
        if order.name not in {card.name for card in adapters.cards()}:
            adapters.publish(adapter)  # rollouts ask for the name before the first update
        connect(data.environment, Judge(runtime.engine.generate, runtime.model.tokenizer))
        parts = JobParts(order.listener, adapters.set_alias, order.name)
        own = dataclasses.replace(runtime, start=adapter)
        spec = PolicySpec(
            name=order.name,
            config=config,
            folder=order.folder,
            title=order.name,
            figures=order.job_id,
            recorder=parts.recorder(order.folder, config.metrics, dataclasses.asdict(config)),
            display=Display(None, is_logged=True, name=order.name),
        )
        async with AsyncExitStack() as sources:
            run = await build_policy_run(spec, own, data, sources, parts)
            kept = await self._pin(order.name, order.folder, serve=False)
            if kept:
                order.listener.saved(kept)
                order.listener.resumed(kept[-1].step)
            stopping = asyncio.create_task(_stop_at(order.stop, run.trainer.stop))
            try:
                await run.trainer.run()
            finally:
                stopping.cancel()
            if not run.trainer.was_stopped:
                self._drop_unnamed(order.name)
            return await asyncio.to_thread(_result, order.folder, run.trainer.was_stopped)

    def _check(self, order: TuningOrder) -> None:
        """Raises ModelError, AdapterError."""
        names, limit = (
            {card.name for card in self._runtime.adapters.cards()},
            self._runtime.settings.server.max_adapters,
        )
        if not self._runtime.model.writes_text:
            raise ModelError("the base writes no text, so no policy can be trained on it")
        if order.name not in names and len(names) >= limit:
            raise AdapterError(f"{len(names)} adapters are loaded, the limit; unload one or raise server.max_adapters")

    async def _start(self, order: TuningOrder) -> Path | None:
        """Return the folder of the adapter to start from, written once: its version may be gone at the next start."""
        folder, model = order.folder / START, self._runtime.model
        if folder.is_dir():
            return find_adapter(str(folder))
        if order.request.model in (BASE, self._runtime.settings.model.path):
            return None
        adapter = self._runtime.adapters.resolve(order.request.model)
        if adapter is None:  # a policy before its first version
            return None
        refuse_head(adapter, order.request.model, "train an adapter that writes text")
        order.folder.mkdir(parents=True, exist_ok=True)
        await on_device(self._runtime.device, partial(_write_start, adapter, folder, model.num_layers, model.name))
        return folder

    async def _pin(self, name: str, folder: Path, *, serve: bool) -> list[SavedVersion]:
        """Keep the versions of all checkpoints in memory under their aliases, and return them, the newest last.

        With `serve` the newest is what the name means. Raises AdapterError.
        """
        runtime, table = self._runtime, self._runtime.adapters
        saved = [
            (SavedVersion(step=int(path.name.rpartition("_")[2]), version=version), path)
            for path in checkpoint_folders(folder)
            if (version := read_version(path)) is not None
        ]
        if not saved:
            return []
        missing = [
            await on_device(runtime.device, partial(self._read, find_adapter(str(path)), name, one.version))
            for one, path in saved
            if not table.holds(name, one.version)
        ]
        newest = max(one.version for one, _ in saved)
        table.restore(
            missing,
            served={name: newest} if serve else {},
            aliases={of_alias(one.alias, name): (name, one.version) for one, _ in saved},
            held=(),
            highest={name: newest} if serve else {},
        )
        return [one for one, _ in saved]

    def _drop_unnamed(self, name: str) -> None:
        """Free the memory of versions that no client has a name for."""
        for card in self._runtime.adapters.cards():
            if card.name == name and not card.aliases and not card.is_served:
                self._runtime.adapters.unload(name, card.version)

    def _read(self, folder: Path, name: str, version: int) -> Adapter:
        model = self._runtime.model
        return read_adapter(folder, model.targets, model_type=model.model_type, name=name, version=version)


class JobParts(Single):
    """The parts of a job's trainer: a recorder and checkpoints that report to the job's row."""

    def __init__(self, listener: JobListener, set_alias: Callable[..., None], name: str) -> None:
        super().__init__()
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._set_alias = set_alias
        self._name = name

    def recorder(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> RunRecorder:
        return JobRecorder(folder, settings, config, self._listener)

    def checkpoints(self, folder: Path, settings: CheckpointSettings) -> CheckpointManager:
        return JobCheckpoints(folder, settings, lambda: self._loop.call_soon_threadsafe(self._saved, folder))

    def _saved(self, folder: Path) -> None:
        kept = [
            SavedVersion(step=int(path.name.rpartition("_")[2]), version=version)
            for path in checkpoint_folders(folder)
            if (version := read_version(path)) is not None
        ]
        if kept:
            with suppress(UnknownModel):  # cancelled meanwhile
                self._set_alias(kept[-1].alias, kept[-1].version, name=self._name)
        self._listener.saved(kept)


class JobRecorder(RunRecorder):
    """A run's recorder that tells a job's row, too."""

    def __init__(
        self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any], listener: JobListener
    ) -> None:
        super().__init__(folder, settings, config)
        self._listener = listener

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None:
        super().step(metrics, groups)
        self._listener.stepped(_step_row(metrics.to_flat()))

    def evaluation(self, report: EvaluationReport, completions: Sequence[EvaluatedCompletion] = ()) -> None:
        super().evaluation(report, completions)
        self._listener.evaluated(_evaluation_row(evaluation_row(report)))


class JobCheckpoints(CheckpointManager):
    """Checkpoints that tell of each save. Saves on the device thread."""

    def __init__(self, folder: Path, settings: CheckpointSettings, tell: Callable[[], object]) -> None:
        super().__init__(folder, settings)
        self._tell = tell

    def save(self, state: TrainingState) -> Path:
        path = super().save(state)
        self._tell()
        return path


def _prepare(
    order: TuningOrder, usual: RunConfig, settings: JobSettings, has_start: bool
) -> tuple[RunConfig, TrainingData, Plan]:
    """Return the configuration, the data and the numbers of a job. Raises ConfigError, ProblemError."""
    config = _config(order, usual, settings, has_start)
    data = read_training_data(config, _environment(order))
    given = data.given
    plan = make_plan(order.request, _usual(usual), len(data.splits.train if given is None else given.train))
    numbers: dict[str, dict[str, Any]] = {
        "learner": {"learning_rate": plan.learning_rate},
        "rollout": {"problems_per_step": plan.batch_size, "group_size": plan.group_size},
        "trainer": {
            "steps": plan.steps,
            "evaluate_every": plan.evaluate_every,
            "evaluate_samples": plan.evaluate_samples if order.request.kind == "reinforcement" else 0,
        },
    }
    return with_parts(config, numbers), data, plan


def _config(order: TuningOrder, usual: RunConfig, settings: JobSettings, has_start: bool) -> RunConfig:
    """Return the configuration but for the numbers that depend on the data."""
    start = str(find_adapter(str(order.folder / START))) if has_start else None
    config = dataclasses.replace(
        usual,
        name=order.job_id,
        seed=order.request.seed,
        model=dataclasses.replace(usual.model, adapter=start),
        environment=_environment_settings(order.request, settings),
        checkpoint=dataclasses.replace(usual.checkpoint, resume="auto"),
    )
    if order.request.kind == "reinforcement":
        is_evaluated = order.validation_file is not None or order.training_file is None
        return config if is_evaluated else with_parts(config, {"trainer": {"evaluate_problems": 0}})
    held_out = None if order.validation_file is None else str(order.folder / HELD_OUT)
    data: dict[str, Any] = {"preset": "sft", "data": str(order.folder / TRAIN), "data_held_out": held_out}
    is_evaluated = held_out is not None
    evaluation: dict[str, Any] = (
        {"evaluate_on": "data"} if is_evaluated else {"evaluate_on": "data", "evaluate_problems": 0}
    )
    return with_parts(config, {"learner": data, "trainer": evaluation})


def _environment_settings(request: TuningRequest, settings: JobSettings) -> Any:
    grader = None if request.grader is None else read_grader(request.grader)
    return (
        settings.environments[grader.name]
        if isinstance(grader, EnvironmentGrader)
        else ArithmeticSettings(num_train=1, num_test=1)
    )


def _environment(order: TuningOrder) -> AnyEnvironment | None:
    """Return the environment of a training file with its grader; None: the one that the configuration names."""
    if order.request.grader is None or order.training_file is None:
        return None
    grader = read_grader(order.request.grader)
    held_out = order.validation_file
    return GradedProblems(
        grader=grader,
        train=read_problems(order.training_file, grader, "train"),
        test=[] if held_out is None else read_problems(held_out, grader, "test"),
    )


def _usual(config: RunConfig) -> Usual:
    return Usual(
        problems_per_step=config.rollout.problems_per_step,
        group_size=config.rollout.group_size,
        learning_rate=config.learner.learning_rate,
        steps=config.trainer.steps,
        evaluate_every=config.trainer.evaluate_every,
        evaluate_samples=config.trainer.evaluate_samples,
    )


def _write_start(adapter: Adapter, folder: Path, num_layers: int, base_name: str) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp")
    write_exactly(adapter, temporary, num_layers=num_layers, base_name=base_name)
    temporary.replace(folder)


async def _stop_at(stop: asyncio.Event, act: Callable[[], None]) -> None:
    await stop.wait()
    act()


def _step_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step under the names of the result file."""
    return {"step": row["step"], "train_loss": row.get("update/loss"), "train_mean_reward": row.get("reward/mean")}


def _evaluation_row(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "valid_loss": "heldout/loss",
        "valid_mean_reward": "heldout/reward",
        "valid_accuracy": "heldout/accuracy",
    }
    return {"step": row["step"], **{name: row[key] for name, key in names.items() if key in row}}


def _result(folder: Path, was_stopped: bool) -> TuningResult:
    steps, evaluations = read_rows(folder / METRICS), read_rows(folder / EVALUATIONS)
    rows: dict[int, dict[str, Any]] = {}
    for row in [*map(_step_row, steps), *map(_evaluation_row, evaluations)]:
        rows[row["step"]] = {**rows.get(row["step"], {}), **row}
    return TuningResult(
        was_stopped=was_stopped,
        trained_tokens=sum(int(row.get("update/tokens") or 0) for row in steps),
        rows=[rows[step] for step in sorted(rows)],
    )
