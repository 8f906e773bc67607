"""What serving and training have in common: the device thread, the model, the engine, the table of versions, HTTP."""

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import mlx.core as mx
from fastapi import FastAPI

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.device.blas import BlasReport, set_blas_threads
from parallm.device.governor import Governor
from parallm.device.memory import wire_memory
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.device.usage import DeviceReport, UsageMonitor
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.kv.budget import max_rows
from parallm.engine.settings import EngineSettings
from parallm.engine.warm_up import warm_up
from parallm.errors import AdapterError, ConfigError
from parallm.learner.settings import LearnerSettings
from parallm.metrics.formatting import short_path
from parallm.metrics.header import RunHeader
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.initial import starting_adapter
from parallm.model.adapters.reward_head import is_reward_model, refuse_reward_model
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.load import check_local, find_folder, load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.reports import TrainingStatus
from parallm.rollout.reward_model import Rate, RewardModel
from parallm.rollout.settings import RewardModelSettings
from parallm.run.operator_state import open_table, restore
from parallm.run.sampling_defaults import sampling_defaults, set_values
from parallm.server.app import create_app
from parallm.server.interfaces import SampleStore, Training, Trajectories
from parallm.server.operation.http_server import HttpServer, Listener
from parallm.server.operation.request_log import writing_request_log
from parallm.server.operation.tracing import exporting_traces
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.trainer.reward_training import find_reward_model, open_reward_model
from parallm.types import BASE, POLICY

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Everything that a command asks of the shared model and its server."""

    model: ModelSettings
    engine: EngineSettings
    server: ServerSettings = ServerSettings(enabled=False)
    policies: tuple[str, ...] = (POLICY,)
    """Names under which clients find what is trained, or the given adapter."""
    seed: int = 0
    """For a new adapter."""
    learner: LearnerSettings = LearnerSettings()
    """The device's share for the engine beside a learner, and how a reward model computes."""
    can_start_from_reward_model: bool = False
    folder: Path | None = None
    """What operators set is kept below it; nowhere if there is none."""
    goes_on: bool = False
    """Whether to begin with what operators have set there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One of each."""

    device: DeviceThread
    streams: DeviceStreams
    model: SharedModel
    adapters: AdapterTable
    engine: AsyncEngine
    start: Adapter
    """The version to go on from: the given adapter, or one whose product is zero."""
    kept: PersistentTable
    """`adapters`, with what operators have set."""
    store: AdapterStore
    reward_model: RewardModel | None
    """The reward model of `server.reward_model`."""

    async def restore(self, given: Mapping[str, str], versions: Mapping[str, int]) -> list[str]:
        """Serve what operators have left, and the adapters `given`; see `operators.restore`."""
        return await restore(self.kept, self.store, given, versions)

    app: FastAPI | None = None
    """What answers HTTP, and requests that this process makes itself; None for work that answers nothing."""

    def of(self, name: str) -> "Runtime":
        """The same, for training the policy `name`."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, name=name))


Work: TypeAlias = Callable[[Runtime, HttpServer | None], Awaitable[None]]
"""What is done with a house, and with its server where there is one."""


async def open_runtime(
    settings: RuntimeSettings,
    blas: BlasReport,
    listens: Listener | None,
    status: Callable[[], TrainingStatus],
    work: Work,
    *,
    trained: tuple[str, ...] = (),
    training: Training | None = None,
    trajectories: Mapping[str, Trajectories] | None = None,
    sample_stores: Mapping[str, SampleStore] | None = None,
    reward_models: Callable[[], Mapping[str, RewardModel]] = dict,
) -> None:
    """Build what `work` needs, run it, and take everything down again. `work` starts the server once what it serves is
    what it says; clients that come before wait.

    `trained` are the policies whose versions `work` makes, `training` is what clients may do to it, `trajectories`
    take what clients want to be learned from, by policy, `sample_stores` remember what a policy has answered, and
    `reward_models` are the reward models of rollouts, by policy.
    """
    device = DeviceThread(
        Governor(serving_share=settings.engine.serving_share, engine_share=settings.learner.engine_share)
    )
    server: HttpServer | None = None
    monitor = UsageMonitor()
    resources = ExitStack()
    try:
        resources.enter_context(writing_request_log(settings.server.request_log))
        traces = resources.enter_context(exporting_traces(settings.server.otlp_endpoint))
        monitor.start()
        resources.callback(monitor.stop)
        _find_reward_model(settings.server)  # before the model, which may take minutes to load
        folder = await asyncio.to_thread(find_folder, settings.model.path)  # may download it
        defaults = set_values(sampling_defaults(settings.server, folder))
        runtime = await _build_runtime(settings, blas, device, trained=trained)
        resources.callback(runtime.kept.close)
        if listens is not None:
            max_tokens = int(defaults.pop("max_new_tokens", settings.server.default_max_tokens))
            service = Service(
                engine=runtime.engine,
                tokenizer=runtime.model.tokenizer,
                catalog=runtime.adapters.cards,
                status=status,
                settings=dataclasses.replace(settings.server, default_max_tokens=max_tokens),
                sampling_defaults=defaults,
                base_name=settings.model.path,
                policies=runtime.adapters.policies,
                keys=listens.keys,
                traces=traces,
                device=DeviceReport(device.governor, monitor),
                adapters=runtime.store,
                training=training,
                trajectories=trajectories or {},
                sample_stores=sample_stores or {},
                swaps=runtime.adapters.num_swaps,
                reward_models=lambda: _rates(runtime.reward_model, reward_models()),
            )
            app = create_app(service)
            runtime = dataclasses.replace(runtime, app=app)
            if listens.bound is not None:
                server = HttpServer(app, listens.bound, settings.server)
        resources.enter_context(_frozen_heap())
        await work(runtime, server)
    finally:
        if server is not None:
            await server.stop()
        device.stop()
        resources.close()


def header_of(name: str, model: ModelSettings, blas: BlasReport, server: HttpServer | None) -> RunHeader:
    """What stands above everything that a command shows."""
    return RunHeader(
        name=name,
        model=model.path,
        adapter=None if model.adapter is None else short_path(Path(model.adapter)),
        device=str(mx.default_device()),
        blas=blas.message.removeprefix("matrix products: "),
        url=server.url if server else None,
    )


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections: one of all takes 0.1 s and stops every stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _build_runtime(
    settings: RuntimeSettings, blas: BlasReport, device: DeviceThread, *, trained: tuple[str, ...]
) -> Runtime:
    engine = AsyncEngine(device, asyncio.get_running_loop())
    await on_device(device, wire_memory)
    model = await on_device(device, partial(load_shared_model, settings.model))
    streams = await on_device(device, lambda: DeviceStreams(partial(set_blas_threads, blas)))
    adapters = AdapterTable(policies=settings.policies)
    begin = partial(starting_adapter, settings.model, model, settings.seed, is_trained=bool(trained))
    start = await on_device(device, begin)
    if not settings.can_start_from_reward_model:
        way_out = "name it as rollout.reward_model.adapter, or train it further with learner=reward_model"
        refuse_reward_model(start, f"model.adapter={settings.model.adapter}", way_out)
    if settings.model.adapter is not None and not is_reward_model(start):
        for name in adapters.policies:
            adapters.publish(dataclasses.replace(start, name=name))
    build = partial(Engine, model, adapters, streams, settings.engine, emit=engine.emit, report=engine.report)
    core = await on_device(device, partial(build, async_scheduling=on_cuda()))
    engine.attach(core)
    if settings.engine.warmup:
        adapted = [name for name in adapters.policies if adapters.resolve(name) is not None]
        await _warm_up(settings.engine, engine, model, [BASE, *adapted])
    kept = open_table(
        settings.server, settings.folder, device, model, adapters, trained=trained, goes_on=settings.goes_on
    )
    store = AdapterStore(
        device,
        model,
        kept,
        root=settings.server.adapters_root,
        max_bytes=settings.server.max_adapter_bytes,
        max_names=settings.server.max_adapters,
        start=start,
    )
    reward_settings = RewardModelSettings(adapter=settings.server.reward_model)
    reward_model = await open_reward_model(reward_settings, settings.learner, device, model, streams)
    return Runtime(
        device=device,
        streams=streams,
        model=model,
        adapters=adapters,
        engine=engine,
        start=start,
        kept=kept,
        store=store,
        reward_model=reward_model,
    )


def _find_reward_model(settings: ServerSettings) -> None:
    """Raise ConfigError if `server.reward_model` names nothing."""
    try:
        find_reward_model(RewardModelSettings(adapter=settings.reward_model))
    except AdapterError as error:
        raise ConfigError(f"server.reward_model: {error}") from error


def _rates(own: RewardModel | None, of_policies: Mapping[str, RewardModel]) -> dict[str, Rate]:
    """Return the reward models by the names for clients: `reward`, and `POLICY@reward` where there are several."""
    named = {f"{policy}@{REWARD}": model.rate for policy, model in of_policies.items()}
    if own is not None:
        return {REWARD: own.rate, **named}
    return dict(zip((REWARD,), named.values(), strict=True)) if len(named) == 1 else named


async def _warm_up(settings: EngineSettings, engine: AsyncEngine, model: SharedModel, names: Sequence[str]) -> None:
    token, rows = model.tokenizer.encode("0")[-1], max_rows(settings)
    for name in names:
        seconds = await warm_up(engine.generate, token, model=name, rows=rows)
        logger.info("warmed up %s for up to %d rows in %.1f s", name, rows, sum(seconds.values()))


async def on_device(device: DeviceThread, function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(device.call(function))


def find_given(settings: ModelSettings) -> ModelSettings:
    """`settings` with the adapter's own folder in place of the run, version or checkpoint that names it.

    Downloads nothing. Raises ModelError for a model folder that is not there or not whole, AdapterError.
    """
    check_local(settings.path)
    if settings.adapter is None:
        return settings
    return dataclasses.replace(settings, adapter=str(find_adapter(settings.adapter)))
