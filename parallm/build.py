"""RunConfig -> live objects: the only place where parts are wired to each other."""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.state import Fingerprint
from parallm.config import RunConfig
from parallm.device.blas import BlasReport, set_blas_threads
from parallm.device.governor import Governor
from parallm.device.lanes import Lanes
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.environment.environment import AnyEnvironment, build_environment, connect
from parallm.interrupts import stop_on_signals, until_signal
from parallm.learner.demonstrations import read_demonstrations
from parallm.learner.learner import Learner
from parallm.learner.pairs import Pairs, read_pairs
from parallm.metrics.display import Display, make_display
from parallm.metrics.record import RunRecorder
from parallm.metrics.run_header import RunHeader
from parallm.model.adapter import Adapter, AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.reward_head import is_reward_model, refuse_reward_model
from parallm.model.shared_model import SharedModel
from parallm.model.starting_adapter import starting_adapter
from parallm.reports import TrainingStatus
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.judge import Judge
from parallm.rollout.problem_stream import make_stream
from parallm.rollout.splits import Splits, read_splits
from parallm.server.app import create_app
from parallm.server.listen import HttpServer, bind
from parallm.trainer.evaluation_samples import evaluation_samples
from parallm.trainer.evaluations import adapter_to_keep
from parallm.trainer.parts import Parts
from parallm.trainer.restoring import restore
from parallm.trainer.reward_training import find_reward_model, open_reward_model, paired, reward_parts
from parallm.trainer.saving import write_adapter
from parallm.trainer.supervised_trainer import SupervisedTrainer, tokenized
from parallm.trainer.trainer import Trainer
from parallm.types import Problem

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What serving and training have in common: one device thread, one model, one engine, one table of versions."""

    device: DeviceThread
    lanes: Lanes
    model: SharedModel
    adapters: AdapterTable
    engine: AsyncEngine
    start: Adapter
    """The version to go on from: the given adapter, or one whose product is zero."""


def run_training(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    """Train, and answer HTTP meanwhile. Returns the exit code; raises ParallmError."""
    return asyncio.run(_train(config, folder, blas))


def run_serving(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    """Answer HTTP until Ctrl-C. Returns the exit code; raises ParallmError."""
    return asyncio.run(_serve(config, folder, blas))


async def _train(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    environment = build_environment(config.environment)
    find_reward_model(config.rollout.reward_model)  # now, since a large model takes minutes to load
    splits = read_splits(environment, config.trainer.evaluate_problems)
    display = make_display(config.metrics.display, sys.stdout)
    recorder = RunRecorder(folder, config.metrics, dataclasses.asdict(config))
    demonstrations, pairs = read_demonstrations(config.learner), read_pairs(config.learner)
    trainer: Trainer | SupervisedTrainer | None = None

    def status() -> TrainingStatus:
        return trainer.status if trainer else TrainingStatus(state="starting", total_steps=config.trainer.steps)

    async def work(house: House, server: HttpServer | None) -> None:
        nonlocal trainer
        display.start(_header(config, folder, blas, server))
        parts = await _make_parts(config, folder, house, environment, splits, recorder, display)
        if pairs is not None:
            make = partial(reward_parts, parts, pairs, config.learner, config.trainer, model=house.model)
            parts = await _on_device(
                house.device, partial(make, lanes=house.lanes, start=house.start, seed=config.seed)
            )
        trainer = _make_trainer(config, house, parts, demonstrations, pairs)
        await _resume(config, house, parts, trainer)
        stop_on_signals(trainer.stop, "finishing this step, then saving and leaving")
        try:
            await trainer.run()
        finally:
            device = "" if blas.name == "reference" else blas.name
            summary = recorder.finish(config.metrics.figures or config.name, device=device)
        kept = adapter_to_keep(parts.adapters, config.trainer.keep_best)
        if kept is not None:
            await _on_device(house.device, partial(write_adapter, kept, folder, house.model))
        display.finish(summary.rows())
        if config.trainer.keep_serving and server is not None and not trainer.was_stopped:
            sys.stdout.write(f"training has ended; {server.url} answers until Ctrl-C\n")
            await until_signal()

    try:
        return await with_house(config, blas, status, work)
    finally:
        display.close()


async def _serve(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    display = make_display("lines" if config.metrics.display == "auto" else config.metrics.display, sys.stdout)

    async def work(_: House, server: HttpServer | None) -> None:
        display.start(_header(config, folder, blas, server))
        await until_signal()

    try:
        return await with_house(config, blas, lambda: TrainingStatus(state="serving"), work)
    finally:
        display.close()


async def with_house(
    config: RunConfig,
    blas: BlasReport,
    status: Callable[[], TrainingStatus],
    work: Callable[[House, HttpServer | None], Awaitable[None]],
) -> int:
    """Build, serve while `work` runs, and take everything down again. The port is bound before the model loads."""
    bound = bind(config.server) if config.server.enabled else None
    device = DeviceThread(Governor(serving_share=config.engine.serving_share, engine_share=config.learner.engine_share))
    server: HttpServer | None = None
    try:
        house = await _build_house(config, blas, device)
        if bound is not None:
            app = create_app(
                engine=house.engine,
                tokenizer=house.model.tokenizer,
                catalog=house.adapters.cards,
                status=status,
                settings=config.server,
                base_name=config.model.path,
            )
            server = HttpServer(app, bound)
            await server.start()
        await work(house, server)
    finally:
        if server is not None:
            await server.stop()
        elif bound is not None:
            bound.close()
        device.stop()
    return 0


async def _build_house(config: RunConfig, blas: BlasReport, device: DeviceThread) -> House:
    engine = AsyncEngine(device, asyncio.get_running_loop())
    model = await _on_device(device, partial(load_shared_model, config.model))
    lanes = await _on_device(device, lambda: Lanes(partial(set_blas_threads, blas)))
    adapters = AdapterTable()
    start = await _on_device(device, partial(starting_adapter, config.model, model, config.seed))
    if config.learner.trains == "policy":
        way_out = "name it as rollout.reward_model.adapter, or train it further with learner=reward_model"
        refuse_reward_model(start, f"model.adapter={config.model.adapter}", way_out)
    if config.model.adapter is not None and not is_reward_model(start):
        await _on_device(device, partial(adapters.publish, start))
    core = await _on_device(
        device, partial(Engine, model, adapters, lanes, config.engine, emit=engine.emit, report=engine.report)
    )
    engine.attach(core)
    return House(device=device, lanes=lanes, model=model, adapters=adapters, engine=engine, start=start)


async def _make_parts(
    config: RunConfig,
    folder: Path,
    house: House,
    environment: AnyEnvironment,
    splits: Splits,
    recorder: RunRecorder,
    display: Display,
) -> Parts:
    connect(environment, Judge(house.engine.generate_all, house.model.tokenizer))
    learner = await _on_device(
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
    fingerprint = await _on_device(house.device, partial(_fingerprint, house))
    reward_model = await open_reward_model(
        config.rollout.reward_model, config.learner, house.device, house.model, house.lanes
    )
    checkpoints = CheckpointManager(folder, config.checkpoint)
    collector = Collector(
        house.engine.generate_all,
        house.model.tokenizer,
        environment,
        make_stream(environment, splits.train, config.seed),
        config.rollout,
        config.seed,
        reward_model,
    )
    evaluator = Evaluator(
        generate_all=house.engine.generate_all,
        tokenizer=house.model.tokenizer,
        environment=environment,
        problems=splits.test,
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
        evaluator=evaluator if splits.test else None,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        recorder=recorder,
        display=display,
    )


def _make_trainer(
    config: RunConfig, house: House, parts: Parts, demonstrations: Sequence[Problem] | None, pairs: Pairs | None
) -> Trainer | SupervisedTrainer:
    per_step = config.rollout.problems_per_step
    if pairs is not None:
        given = paired(pairs.train, house.model, per_step=per_step, seed=config.seed)
    elif demonstrations is not None:
        given = tokenized(demonstrations, house.model, per_step=per_step, seed=config.seed)
    else:
        return Trainer(parts, config.trainer, config.rollout, save_every=config.checkpoint.every)
    return SupervisedTrainer(parts, given, config.trainer, save_every=config.checkpoint.every)


async def _resume(config: RunConfig, house: House, parts: Parts, trainer: Trainer | SupervisedTrainer) -> None:
    load = partial(parts.checkpoints.load, config.checkpoint.resume, parts.fingerprint)
    state = await _on_device(house.device, load)
    if state is not None:
        await _on_device(house.device, partial(restore, parts, state, serve=config.trainer.publish_if == "always"))
        trainer.resume(state)
        parts.display.message(f"resumed after step {state.step}, version {state.version}")


def _fingerprint(house: House) -> Fingerprint:
    return Fingerprint(
        model=house.model.name,
        model_sha256=house.model.fingerprint(),
        num_layers=house.model.num_layers,
        rank=house.start.rank,
        alpha=house.start.alpha,
        targets=house.start.targets,
        ranks=dict(house.start.ranks),
        rslora=house.start.rslora,
        dora=house.start.is_dora,
    )


def _header(config: RunConfig, folder: Path, blas: BlasReport, server: HttpServer | None) -> RunHeader:
    return RunHeader(
        name=config.name,
        model=config.model.path,
        device=str(mx.default_device()),
        blas=blas.message,
        url=server.url if server else None,
        folder=str(folder),
        total_steps=config.trainer.steps,
    )


async def _on_device(device: DeviceThread, function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(device.call(function))
