"""RunConfig -> a run: the wiring of `parallm.train`, on top of `runtime` and `policy_runs`."""

import asyncio
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from parallm.config.run_folder import link_latest
from parallm.config.schema import RunConfig, policy_configs
from parallm.device.blas import BlasReport
from parallm.environment.environment import AnyEnvironment, connect
from parallm.errors import CheckpointError
from parallm.interrupts import stop_on_signals, until_signal
from parallm.metrics.display import Display, LoggedDisplay, make_display
from parallm.metrics.eta import Schedule
from parallm.metrics.formatting import short_path
from parallm.metrics.summary import RunSummary, flat_reward_advice
from parallm.reports import TrainingStatus
from parallm.rollout.judge import Judge
from parallm.run.build_trainer import leave_adapter, make_trainer, rescue_adapter
from parallm.run.child_processes import child_processes
from parallm.run.operator_state import check_given
from parallm.run.policy_runs import (
    PolicyRun,
    TrainingControl,
    combined_status,
    how_to_go_on,
    make_policy_runs,
    raise_failures,
    stop_all,
    train_all,
)
from parallm.run.runtime import Runtime, RuntimeSettings, find_given, header_of, open_runtime
from parallm.run.training_data import TrainingData, read_training_data
from parallm.server.operation.http_server import HttpServer, Listener, listening
from parallm.types import POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A run that answers requests and is about to train."""

    runtime: Runtime
    server: HttpServer | None
    runs: tuple[PolicyRun, ...]
    control: TrainingControl
    display: Display


class Caller(Protocol):
    """The terminal or the program that a run belongs to."""

    def begun(self, run: Begun) -> None:
        """Called before the first step."""

    async def ended(self, run: Begun) -> None:
        """Called after training, unless it has failed. The model goes away when this returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The caller of `parallm.train`. The first signal stops the run."""

    config: RunConfig
    folder: Path

    def begun(self, run: Begun) -> None:
        stop_on_signals(partial(_leave, run.runs, run.server), "finishing this step, then saving and leaving")

    async def ended(self, run: Begun) -> None:
        if any(one.was_stopped for one in run.runs):
            run.display.message(how_to_go_on(self.config, self.folder, run.runs))
        elif self.config.trainer.keep_serving and run.server is not None:
            sys.stdout.write(f"training has ended; {run.server.url} answers until Ctrl-C\n")
            await until_signal()


def run_training(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    """Train, and answer HTTP meanwhile. Returns the exit code; raises ParallmError."""
    asyncio.run(_train(config, folder, blas))
    return 0


async def _train(config: RunConfig, folder: Path, blas: BlasReport) -> None:
    config = checked(config)
    with listening(config.server) as listens:
        await train(config, folder, blas, listens, Terminal(config=config, folder=folder))


def checked(config: RunConfig) -> RunConfig:
    """`config` with the folder of its adapter. Raises ParallmError for what would be wrong later, before it is slow."""
    check_given(config.server.adapters, dict.fromkeys(policy_configs(config), "trained by this run"))
    return replace(config, model=find_given(config.model))


async def train(
    config: RunConfig,
    folder: Path,
    blas: BlasReport,
    listens: Listener | None,
    caller: Caller,
    environment: AnyEnvironment | None = None,
) -> None:
    """Train with a configuration that is `checked`. `environment` takes the place of the one that it names.

    Raises ParallmError.
    """
    training_data = {name: read_training_data(one, environment) for name, one in policy_configs(config).items()}
    schedules = {name: _schedule(one, training_data[name]) for name, one in policy_configs(config).items()}
    is_auto_lines = config.policies and config.metrics.display == "auto"  # a live table shows one policy
    display = LoggedDisplay(make_display("lines" if is_auto_lines else config.metrics.display, sys.stdout))
    runs = make_policy_runs(config, folder, display, schedules)
    live = {run.name: run.traffic for run in runs if run.traffic is not None}
    ledgers = {run.name: run.atropos.sample_store for run in runs if run.atropos is not None}
    control = TrainingControl(runs)
    sources = [source for run in runs for source in (run.traffic, run.atropos) if source is not None]

    def status() -> TrainingStatus:
        return combined_status({run.name: run.status for run in runs})

    async def work(runtime: Runtime, server: HttpServer | None) -> None:
        schedule = None if config.policies else schedules[POLICY]
        header = header_of(config.name, config.model, blas, server)
        display.start(replace(header, folder=short_path(folder), policies=tuple(config.policies), schedule=schedule))
        judge = Judge(runtime.engine.generate_all, runtime.model.tokenizer)  # one for all: it numbers its requests
        async with child_processes(runs, server):
            for run in runs:
                connect(training_data[run.name].environment, judge)
                run.trainer = await make_trainer(run, runtime.of(run.name), training_data[run.name])
            versions = {run.name: run.resumed_version for run in runs}
            for text in await runtime.restore(config.server.adapters, versions):
                display.message(text)
            link_latest(folder)
            for run in runs:
                run.recorder.start()
            if server is not None:
                await server.start()
            begun = Begun(runtime=runtime, server=server, runs=runs, control=control, display=display)
            caller.begun(begun)
            try:
                failures = await train_all(runs)
            finally:
                for source in sources:
                    source.end()
                device = "" if blas.name == "reference" else blas.name
                summaries = [run.recorder.finish(run.figures, title=run.title, device=device) for run in runs]
        for run, summary in zip(runs, summaries, strict=True):
            await _end(run, runtime, summary, failures.get(run.name))
        raise_failures(failures, is_alone=len(runs) == 1)
        await caller.ended(begun)

    settings = RuntimeSettings(
        model=config.model,
        engine=config.engine,
        server=config.server,
        policies=tuple(policy_configs(config)),
        seed=config.seed,
        learner=config.learner,
        can_start_from_reward_model=all(run.config.learner.trains == "reward_model" for run in runs),
        folder=folder,
        goes_on=config.checkpoint.resume == "auto",
    )
    try:
        await open_runtime(
            settings,
            blas,
            listens,
            status,
            work,
            trained=settings.policies,
            training=control,
            trajectories=live,
            sample_stores=ledgers,
            reward_models=lambda: {run.name: run.reward_model for run in runs if run.reward_model is not None},
        )
    finally:
        display.close()
        await asyncio.gather(*(source.close() for source in sources))


def _leave(runs: tuple[PolicyRun, ...], server: HttpServer | None) -> None:
    """The trainers finish their steps; clients with new requests go elsewhere from now on."""
    stop_all(runs)
    if server is not None:
        server.drain()


async def _end(run: PolicyRun, runtime: Runtime, summary: RunSummary, failure: BaseException | None) -> None:
    if failure is None:
        await leave_adapter(run, runtime)
        if (text := flat_reward_advice(summary.steps)) is not None:
            run.display.message(text)
        run.display.finish(summary.rows())
    elif isinstance(failure, CheckpointError):
        await rescue_adapter(run, runtime)


def _schedule(config: RunConfig, training_data: TrainingData) -> Schedule:
    return Schedule(
        total_steps=config.trainer.steps,
        evaluate_every=config.trainer.evaluate_every if training_data.has_held_out else None,
        waits_for_others=config.rollout.source != "environment",
    )
