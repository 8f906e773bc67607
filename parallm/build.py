"""RunConfig -> a run: the wiring of `parallm.train`, on top of `house` and `policy_runs`."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallm.build_trainer import leave_adapter, make_trainer, rescue_adapter
from parallm.companions import with_companions
from parallm.config import RunConfig, policy_configs
from parallm.device.blas import BlasReport
from parallm.environment.environment import connect
from parallm.errors import CheckpointError
from parallm.given_model import find_given
from parallm.house import House, HouseSettings, Listening, header_of, listening, with_house
from parallm.interrupts import stop_on_signals, until_signal
from parallm.lessons import Lessons, read_lessons
from parallm.metrics.display import LoggedDisplay, make_display
from parallm.metrics.summary import RunSummary
from parallm.metrics.time_left import Schedule
from parallm.metrics.trend import no_rise
from parallm.metrics.wording import short_path
from parallm.model.settings import ModelSettings
from parallm.operators import check_given
from parallm.policy_runs import (
    PolicyRun,
    combined_status,
    how_to_go_on,
    make_policy_runs,
    raise_failures,
    stop_all,
    train_all,
)
from parallm.reports import TrainingStatus
from parallm.rollout.judge import Judge
from parallm.run_folder import link_latest
from parallm.server.operation.listen import HttpServer
from parallm.training_control import TrainingControl
from parallm.types import POLICY


def run_training(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    """Train, and answer HTTP meanwhile. Returns the exit code; raises ParallmError."""
    asyncio.run(_train(config, folder, blas))
    return 0


async def _train(config: RunConfig, folder: Path, blas: BlasReport) -> None:
    check_given(config.server.adapters, dict.fromkeys(policy_configs(config), "trained by this run"))
    model = find_given(config.model)
    with listening(config.server) as listens:
        await _train_and_answer(config, model, folder, blas, listens)


async def _train_and_answer(
    config: RunConfig, model: ModelSettings, folder: Path, blas: BlasReport, listens: Listening | None
) -> None:
    lessons = {name: read_lessons(one) for name, one in policy_configs(config).items()}
    schedules = {name: _schedule(one, lessons[name]) for name, one in policy_configs(config).items()}
    is_auto_lines = config.policies and config.metrics.display == "auto"  # a live table shows one policy
    display = LoggedDisplay(make_display("lines" if is_auto_lines else config.metrics.display, sys.stdout))
    runs = make_policy_runs(config, folder, display, schedules)
    live = {run.name: run.traffic for run in runs if run.traffic is not None}
    ledgers = {run.name: run.atropos.ledger for run in runs if run.atropos is not None}
    sources = [source for run in runs for source in (run.traffic, run.atropos) if source is not None]

    def status() -> TrainingStatus:
        return combined_status({run.name: run.status for run in runs})

    async def work(house: House, server: HttpServer | None) -> None:
        schedule = None if config.policies else schedules[POLICY]
        header = header_of(config.name, model, blas, server)
        display.start(replace(header, folder=short_path(folder), policies=tuple(config.policies), schedule=schedule))
        judge = Judge(house.engine.generate_all, house.model.tokenizer)  # one for all: it numbers its requests
        async with with_companions(runs, server):
            for run in runs:
                connect(lessons[run.name].environment, judge)
                run.trainer = await make_trainer(run, house.of(run.name), lessons[run.name])
            versions = {run.name: run.resumed_version for run in runs}
            for text in await house.restore(config.server.adapters, versions):
                display.message(text)
            link_latest(folder)
            for run in runs:
                run.recorder.start()
            if server is not None:
                await server.start()
            stop_on_signals(partial(_leave, runs, server), "finishing this step, then saving and leaving")
            try:
                failures = await train_all(runs)
            finally:
                for source in sources:
                    source.end()
                device = "" if blas.name == "reference" else blas.name
                summaries = [run.recorder.finish(run.figures, title=run.title, device=device) for run in runs]
        for run, summary in zip(runs, summaries, strict=True):
            await _end(run, house, summary, failures.get(run.name))
        raise_failures(failures, is_alone=len(runs) == 1)
        if any(run.was_stopped for run in runs):
            display.message(how_to_go_on(config, folder, runs))
        elif config.trainer.keep_serving and server is not None:
            sys.stdout.write(f"training has ended; {server.url} answers until Ctrl-C\n")
            await until_signal()

    settings = HouseSettings(
        model=model,
        engine=config.engine,
        server=config.server,
        policies=tuple(policy_configs(config)),
        seed=config.seed,
        learner=config.learner,
        can_start_from_reward_model=all(run.config.learner.trains == "reward_model" for run in runs),
        folder=folder,
        goes_on=config.checkpoint.resume == "auto",
    )
    training = TrainingControl(runs)
    try:
        await with_house(
            settings,
            blas,
            listens,
            status,
            work,
            trained=settings.policies,
            training=training,
            trajectories=live,
            witnesses=ledgers,
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


async def _end(run: PolicyRun, house: House, summary: RunSummary, failure: BaseException | None) -> None:
    if failure is None:
        await leave_adapter(run, house)
        if (text := no_rise(summary.steps)) is not None:
            run.display.message(text)
        run.display.finish(summary.rows())
    elif isinstance(failure, CheckpointError):
        await rescue_adapter(run, house)


def _schedule(config: RunConfig, lessons: Lessons) -> Schedule:
    return Schedule(
        total_steps=config.trainer.steps,
        evaluate_every=config.trainer.evaluate_every if lessons.has_held_out else None,
        waits_for_others=config.rollout.source != "environment",
    )
