"""RunConfig -> a run: the wiring of `parallm.train`, on top of `house` and `policy_runs`."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallm.checkpoint.manager import CheckpointManager
from parallm.companions import with_companions
from parallm.config import RunConfig, policy_configs
from parallm.device.blas import BlasReport
from parallm.environment.environment import connect
from parallm.errors import ConfigError
from parallm.given_model import find_given
from parallm.house import House, HouseSettings, Listening, header_of, listening, on_device, with_house
from parallm.interrupts import stop_on_signals, until_signal
from parallm.learner.learner import Learner
from parallm.lessons import Lessons, read_lessons
from parallm.metrics.display import LoggedDisplay, make_display
from parallm.metrics.time_left import Schedule
from parallm.metrics.wording import short_path
from parallm.model.settings import ModelSettings
from parallm.model_names import of_alias
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
from parallm.rollout.atropos.rescoring import Rescorer
from parallm.rollout.atropos.scored_group import Limits
from parallm.rollout.atropos.source import AtroposSource
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.judge import Judge
from parallm.rollout.problem_stream import make_stream
from parallm.run_folder import link_latest
from parallm.server.operation.listen import HttpServer
from parallm.trainer.evaluation_samples import evaluation_samples
from parallm.trainer.evaluations import adapter_to_keep
from parallm.trainer.live_trainer import LiveTrainer
from parallm.trainer.loop import Loop
from parallm.trainer.parts import Parts
from parallm.trainer.restoring import restore
from parallm.trainer.reward_training import open_reward_model, paired, reward_parts
from parallm.trainer.saving import fingerprint_of, write_adapter
from parallm.trainer.supervised_trainer import SupervisedTrainer, tokenized, with_held_out
from parallm.trainer.trainer import Trainer
from parallm.training_control import TrainingControl
from parallm.types import LATEST, POLICY


def run_training(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    """Train, and answer HTTP meanwhile. Returns the exit code; raises ParallmError."""
    asyncio.run(_train(config, folder, blas))
    return 0


async def _train(config: RunConfig, folder: Path, blas: BlasReport) -> None:
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
                run.trainer = await _make_trainer(run, house.of(run.name), lessons[run.name])
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
            if run.name not in failures:
                await _leave_adapter(run, house)
                run.display.finish(summary.rows())
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
        engine_share=config.learner.engine_share,
        can_start_from_reward_model=all(run.config.learner.trains == "reward_model" for run in runs),
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
        )
    finally:
        display.close()
        await asyncio.gather(*(source.close() for source in sources))


def _leave(runs: tuple[PolicyRun, ...], server: HttpServer | None) -> None:
    """The trainers finish their steps; clients with new requests go elsewhere from now on."""
    stop_all(runs)
    if server is not None:
        server.drain()


async def _make_trainer(run: PolicyRun, house: House, lessons: Lessons) -> Loop:
    """A trainer that goes on where its checkpoints end."""
    config, parts = run.config, await _make_parts(run, house, lessons)
    per_step, save_every = config.rollout.problems_per_step, config.checkpoint.every
    trainer: Loop
    if lessons.pairs is not None:
        make = partial(reward_parts, parts, lessons.pairs, config.learner, config.trainer, start=house.start)
        make = partial(make, model=house.model, lanes=house.lanes, seed=config.seed)
        parts = await on_device(house.device, make)
        given = paired(lessons.pairs.train, house.model, per_step=per_step, seed=config.seed)
        trainer = SupervisedTrainer(parts, given, config.trainer, save_every=save_every)
    elif lessons.demonstrations is not None:
        held_out = lessons.demonstrations.held_out[: config.trainer.evaluate_problems]
        parts = with_held_out(parts, held_out, house.model)
        given = tokenized(lessons.demonstrations.train, house.model, per_step=per_step, seed=config.seed)
        trainer = SupervisedTrainer(parts, given, config.trainer, save_every=save_every)
    elif run.traffic is not None:
        run.traffic.connect(partial(house.model.tokenizer.decode, special=True))
        trainer = LiveTrainer(parts, run.traffic, config.trainer, config.rollout, save_every=save_every)
    elif run.atropos is not None:
        trainer = LiveTrainer(parts, run.atropos, config.trainer, config.rollout, save_every=save_every)
    else:
        trainer = Trainer(parts, config.trainer, config.rollout, save_every=save_every)
    run.adapters = parts.adapters
    load = partial(parts.checkpoints.load, config.checkpoint.resume, parts.fingerprint)
    state = await on_device(house.device, load)
    if state is not None:
        await on_device(house.device, partial(restore, parts, state, serve=config.trainer.publish_if == "always"))
        trainer.resume(state)
        parts.display.message(f"resumed after step {state.step}, version {state.version}")
    if run.atropos is not None:
        _connect(run.atropos, config, house, parts.policy, version=parts.learner.adapter.version)
    return trainer


def _connect(source: AtroposSource, config: RunConfig, house: House, policy: str, *, version: int) -> None:
    """Raises ConfigError for sequences that no model here could compute."""
    longest = config.rollout.atropos.max_token_len
    if longest > house.engine.max_context:
        raise ConfigError(
            f"rollout.atropos.max_token_len={longest} is more than the context of {house.engine.max_context} tokens "
            "(engine.max_context); lower it"
        )
    source.connect(
        Limits(max_tokens=longest, num_token_ids=house.model.vocabulary_size),
        Rescorer(house.engine.generate_all, of_alias(LATEST, policy)),
        partial(house.model.tokenizer.decode, special=True),
        version,
    )


async def _make_parts(run: PolicyRun, house: House, lessons: Lessons) -> Parts:
    config = run.config
    learner = await on_device(
        house.device,
        partial(
            Learner,
            house.model,
            house.lanes,
            config.learner,
            start=house.start,
            total_steps=config.trainer.steps,
            seed=config.seed,
        ),
    )
    fingerprint = await on_device(house.device, partial(fingerprint_of, house.model, house.start))
    reward_model = await open_reward_model(
        config.rollout.reward_model, config.learner, house.device, house.model, house.lanes
    )
    checkpoints = CheckpointManager(run.folder, config.checkpoint)
    collector = Collector(
        house.engine.generate_all,
        house.model.tokenizer,
        lessons.environment,
        make_stream(lessons.environment, lessons.splits.train, config.seed),
        config.rollout,
        config.seed,
        reward_model,
    )
    evaluator = Evaluator(
        generate_all=house.engine.generate_all,
        tokenizer=house.model.tokenizer,
        environment=lessons.environment,
        problems=lessons.splits.test,
        max_tokens=config.rollout.max_tokens,
        samples=evaluation_samples(config.trainer, config.seed),
        rollout=config.rollout,
        reward_model=reward_model,
    )
    return Parts(
        device=house.device,
        engine=house.engine,
        learner=learner,
        adapters=house.adapters,
        collector=collector,
        evaluator=evaluator if lessons.splits.test else None,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        recorder=run.recorder,
        display=run.display,
    )


async def _leave_adapter(run: PolicyRun, house: House) -> None:
    assert run.adapters is not None, "its trainer has run"
    kept = adapter_to_keep(run.adapters, run.name, run.config.trainer.keep_best)
    if kept is not None:
        await on_device(house.device, partial(write_adapter, kept, run.folder, house.model))


def _schedule(config: RunConfig, lessons: Lessons) -> Schedule:
    return Schedule(
        total_steps=config.trainer.steps,
        evaluate_every=config.trainer.evaluate_every if lessons.has_held_out else None,
        waits_for_others=config.rollout.source != "environment",
    )
