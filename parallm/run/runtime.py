"""The runtime of every command: device thread, model, engine, table of adapter versions; and the application over it.

`run/train.py`, `run/serve.py` and `run/evaluate.py` open it; whatever it holds ends with its `async with`.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
from fastapi import FastAPI

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.config.run_folder import RUNS_FOLDER
from parallm.device.blas import BlasReport, set_blas_threads
from parallm.device.garbage import frozen_heap
from parallm.device.governor import Governor
from parallm.device.memory import wire_memory
from parallm.device.settings import DeviceSettings
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.device.usage import DeviceReport, UsageMonitor
from parallm.distributed.rollout_engines.host import ReplicaHost
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.kernel_list import engine_kernels
from parallm.engine.prefill import chunk_tokens
from parallm.engine.settings import EngineSettings
from parallm.engine.warm_up import warm_up
from parallm.errors import AdapterError, ConfigError, ModelError
from parallm.jobs.jobs import Jobs
from parallm.learner.kernel_list import learner_kernels, packed_kernels
from parallm.learner.settings import LearnerSettings
from parallm.metrics.display import RunHeader
from parallm.metrics.formatting import short_path
from parallm.metrics.run_folders import RunFolders
from parallm.metrics.watching import Watching
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.initial import starting_adapter
from parallm.model.adapters.reward_head import read_reward_model, refuse_head
from parallm.model.adapters.table import AdapterTable
from parallm.model.gguf.folder import WEIGHTS, weights_of
from parallm.model.kernels.compiler import Specialization
from parallm.model.kernels.cuda import has_kernels, on_cuda, target
from parallm.model.kernels.preparation import prepare_kernels
from parallm.model.load import check_local, find_folder, load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.registry.discovery import describe, describe_gguf, digest_of
from parallm.registry.pool import Pool
from parallm.reports import TrainingStatus
from parallm.rollout.reward_model import Rate, RewardModel
from parallm.rollout.settings import RewardModelSettings
from parallm.run.operator_state import open_nets, open_table, restore
from parallm.run.sampling_defaults import sampling_defaults
from parallm.server.app import create_app
from parallm.server.engine_gateway import CompletionListener
from parallm.server.interfaces import Training, Trajectories
from parallm.server.operation.acts import Act
from parallm.server.operation.http_server import HttpServer, Listener
from parallm.server.operation.request_context import writing_request_log
from parallm.server.operation.tracing import Traces, exporting_traces
from parallm.server.service import OwnBase, Service
from parallm.server.settings import ServerSettings
from parallm.tasks.actor import Actor
from parallm.tasks.encoder import Encoder
from parallm.tasks.predictor import Predictor
from parallm.tasks.settings import TaskSettings
from parallm.trainer.reward_training import find_reward_model
from parallm.types import BASE, POLICY

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
REWARD = "reward"
DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
"""Names that lists of models have for types of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """What a command needs of the shared model and its server."""

    model: ModelSettings
    engine: EngineSettings
    device: DeviceSettings = DeviceSettings()
    server: ServerSettings = ServerSettings(enabled=False)
    tasks: TaskSettings = TaskSettings()
    policies: tuple[str, ...] = (POLICY,)
    """Names of the trained adapters, or of the given one."""
    is_training: bool = False
    """Whether the policies get new versions."""
    needs_text: bool = False
    """Whether the model has to write text: to sample, or to be trained on it."""
    can_start_from_reward_model: bool = False
    """Whether model.adapter may be a reward model."""
    seed: int = 0
    """Seed of a new adapter."""
    learner: LearnerSettings = LearnerSettings()
    """Settings of the passes of reward models."""
    log_max_bytes: int | None = None
    """Size at which the log of requests is rotated."""
    folder: Path | None = None
    """Folder above the state of operators; None keeps no state."""
    keeps_state: bool = False
    """Whether to continue with the state of operators in `folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The loaded model with everything that samples from it. Made by `open_runtime`."""

    settings: RuntimeSettings
    device: DeviceThread
    streams: DeviceStreams
    model: SharedModel
    adapters: AdapterTable
    engine: AsyncEngine
    encoder: Encoder
    actor: Actor
    predictor: Predictor
    start: Adapter
    """The version to train from: the given adapter, or a new one whose product is zero."""
    kept: PersistentTable
    """`adapters` with the state of operators."""
    store: AdapterStore
    base_folder: Path
    host: ReplicaHost | None
    """This process as a rollout engine of a trainer elsewhere; None while it trains itself."""
    sampling_defaults: Mapping[str, float]
    report: DeviceReport
    traces: Traces | None

    def for_policy(self, name: str) -> "Runtime":
        """Return the same for training the policy `name`."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, name=name))

    async def restore(self, given: Mapping[str, str], versions: Mapping[str, int]) -> list[str]:
        """Serve what operators have set, and the adapters `given`; see `operator_state.restore`."""
        return await restore(self.kept, self.store, given, versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """The ASGI application of a runtime, and its server if a port is bound."""

    make_app: Callable[[], FastAPI]
    """Returns `app`."""
    server: HttpServer | None
    pool: Pool | None = None

    @property
    def app(self) -> FastAPI:
        """Made when it is first asked for, which takes some 50 ms; on the event loop's thread."""
        return self.make_app()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What differs where several processes compute one model."""

    load: Callable[[ModelSettings], SharedModel] = load_shared_model
    engine: Callable[..., Engine] = Engine


WHOLE = EngineParts()
"""A process with a whole model."""


@asynccontextmanager
async def open_runtime(
    settings: RuntimeSettings,
    blas: BlasReport,
    tell: Callable[[str], None] = logger.info,
    parts: EngineParts = WHOLE,
) -> AsyncIterator[Runtime]:
    """Load the model and start its engine; close everything at the end. `tell` shows what takes long.

    Raises ParallmError.
    """
    with ExitStack() as resources:
        resources.enter_context(writing_request_log(settings.server.request_log, settings.log_max_bytes))
        traces = resources.enter_context(exporting_traces(settings.server.otlp_endpoint))
        monitor = UsageMonitor()
        monitor.start()
        resources.callback(monitor.stop)
        _check_reward_model(settings.server)  # before the model, which may take minutes to load
        folder = await asyncio.to_thread(find_folder, settings.model.path)  # may download it
        defaults = sampling_defaults(settings.server, folder)
        shares = settings.device
        governor = Governor(
            serving_share=shares.serving_share,
            engine_share=shares.engine_share,
            serving_latency_target=shares.serving_latency_target,
        )
        device = DeviceThread(governor)
        resources.callback(device.stop)
        await on_device(device, wire_memory)
        nets = open_nets(settings.server, settings.folder, continues=settings.keeps_state)
        actor = Actor(
            device, max_names=settings.server.max_adapters, max_waiting=settings.engine.max_waiting, folder=nets
        )
        if nets is not None:
            resources.callback(nets.close)
        await actor.load(settings.tasks.policies)
        model = await on_device(device, partial(parts.load, settings.model))
        if settings.needs_text and not model.writes_text:
            raise ModelError(
                f"model.path={settings.model.path}: {model.model_type} has no language model's head here, so it writes "
                "no text; parallm.serve serves it, and policies need a base that writes"
            )
        streams = await on_device(device, lambda: DeviceStreams(partial(set_blas_threads, blas)))
        adapters = AdapterTable(policies=settings.policies)
        adapters.elsewhere = actor.elsewhere
        start = await _starting_adapter(settings, device, model, adapters)
        encoder = Encoder(
            device,
            streams,
            model,
            adapters,
            settings.tasks,
            folder,
            unit_tokens=chunk_tokens(settings.engine),
            max_waiting=settings.engine.max_waiting,
        )
        if has_kernels():
            has_task = encoder.has_base_spec or start.spec is not None
            needed = await on_device(device, partial(_needed_kernels, settings, model, start, has_task))
            await asyncio.to_thread(prepare_kernels, needed, target(), partial(_tell_kernels, tell))
        engine = await _start_engine(parts.engine, settings.engine, device, model, adapters, streams)
        predictor = Predictor(
            device,
            streams,
            model,
            adapters,
            encoder,
            max_context=engine.max_context,
            max_waiting=settings.engine.max_waiting,
        )
        trained = settings.policies if settings.is_training else ()
        kept = open_table(
            settings.server, settings.folder, device, model, adapters, trained=trained, continues=settings.keeps_state
        )
        resources.callback(kept.close)
        resources.callback(device.stop)  # before `kept` is closed
        host = None if settings.is_training else ReplicaHost(device, model, kept, engine)
        store = AdapterStore(
            device,
            model,
            kept,
            root=settings.server.adapters_root,
            max_bytes=settings.server.max_adapter_bytes,
            max_names=settings.server.max_adapters,
            start=start,
            owner=None if host is None else host.owner,
        )
        await on_device(device, partial(_publish_reward_model, settings.server, model, adapters))
        yield Runtime(
            settings=settings,
            device=device,
            streams=streams,
            model=model,
            adapters=adapters,
            engine=engine,
            encoder=encoder,
            actor=actor,
            predictor=predictor,
            start=start,
            kept=kept,
            store=store,
            base_folder=folder,
            host=host,
            sampling_defaults=defaults,
            report=DeviceReport(device.governor, monitor),
            traces=traces,
        )


@asynccontextmanager
async def open_application(
    runtime: Runtime,
    listener: Listener,
    status: Callable[[], TrainingStatus],
    *,
    training: Training | None = None,
    trajectories: Mapping[str, Trajectories] | None = None,
    sample_stores: Mapping[str, CompletionListener] | None = None,
    reward_models: Mapping[str, RewardModel] | None = None,
    jobs: Jobs | None = None,
    pool: Pool | None = None,
    watching: Watching | None = None,
    on_act: Callable[[Act], None] = lambda _: None,
) -> AsyncIterator[Application]:
    """Answer requests until the end, over HTTP if `listener` is bound; clients that connect before wait.

    `on_act` gets what clients do to training and to what is served.
    `training` is clients' control of the trainers, `watching` what those see who watch. The other parts are by policy:
    where clients' trajectories go, what records sampled completions, and the reward models of rollouts.
    """
    settings = runtime.settings
    server_settings, defaults = with_max_tokens(settings.server, runtime.sampling_defaults)
    service = Service(
        engine=runtime.engine,
        tokenizer=runtime.model.tokenizer,
        catalog=runtime.adapters.cards,
        status=status,
        settings=server_settings,
        sampling_defaults=defaults,
        base_name=settings.model.path,
        policies=runtime.adapters.policies,
        keys=listener.keys,
        traces=runtime.traces,
        device=runtime.report,
        adapters=runtime.store,
        training=training,
        trajectories=trajectories or {},
        sample_stores=sample_stores or {},
        swaps=runtime.adapters.num_swaps,
        reward_models=partial(_rates, runtime.settings.server.reward_model is not None, reward_models or {}),
        encoder=runtime.encoder,
        actor=runtime.actor,
        predictor=runtime.predictor,
        replica=runtime.host,
        jobs=jobs,
        models=pool,
        watching=watching or Watching(folders=RunFolders([RUNS_FOLDER])),
        on_act=on_act,
        rows=runtime.engine.rows,
        spans=runtime.device.spans.since,
    )
    service.watching.device_name = str(mx.default_device())
    if settings.server.ollama:
        service.base = await asyncio.to_thread(_own_base, runtime)
    make_app = cache(partial(create_app, service, pool))  # it takes long, and a run without a port asks for none
    server = None if listener.bound is None else HttpServer(make_app(), listener.bound, settings.server)
    async with AsyncExitStack() as stack:
        stack.enter_context(frozen_heap())
        if server is not None and server_settings.dashboard:
            await stack.enter_async_context(service.watching.open())
        try:
            if server is not None:
                await server.start()
            yield Application(make_app=make_app, server=server, pool=pool)
        finally:
            if server is not None:
                await server.stop()


def with_max_tokens(settings: ServerSettings, defaults: Mapping[str, float]) -> tuple[ServerSettings, dict[str, float]]:
    """Return the settings of a service with the most tokens of an answer, and the other sampling defaults."""
    others = dict(defaults)
    max_tokens = int(others.pop("max_new_tokens", settings.default_max_tokens))
    return dataclasses.replace(settings, default_max_tokens=max_tokens), others


def _own_base(runtime: Runtime) -> OwnBase:
    """Describe the base. Raises ModelError."""
    model, folder, source = runtime.model, runtime.base_folder, runtime.settings.model.path
    weights = folder / WEIGHTS
    if weights.exists():
        described = describe_gguf(source, weights_of(folder))
    else:
        described = describe(source, folder, digest_of(folder))
    level = described.quantization or DTYPES[model.dtype]
    return OwnBase(
        model=dataclasses.replace(described, quantization=level),
        num_bytes=model.base_bytes,
        is_on_accelerator=mx.default_device() != mx.cpu,
    )


def header_of(name: str, model: ModelSettings, blas: BlasReport, url: str | None) -> RunHeader:
    """Return the header of everything that a command shows."""
    return RunHeader(
        name=name,
        model=model.path,
        adapter=None if model.adapter is None else short_path(Path(model.adapter)),
        device=str(mx.default_device()),
        blas=blas.message.removeprefix("matrix products: "),
        url=url,
    )


def resolve_model(settings: ModelSettings) -> ModelSettings:
    """Replace the run, version or checkpoint in model.adapter by the adapter's own folder. Downloads nothing.

    Raises ModelError for a missing or incomplete model folder, AdapterError.
    """
    check_local(settings.path)
    if settings.adapter is None:
        return settings
    return dataclasses.replace(settings, adapter=str(find_adapter(settings.adapter)))


async def on_device(device: DeviceThread, function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(device.call(function))


async def _starting_adapter(
    settings: RuntimeSettings, device: DeviceThread, model: SharedModel, adapters: AdapterTable
) -> Adapter:
    """Return the version to train from, after a given adapter is published."""
    make = partial(starting_adapter, settings.model, model, settings.seed, is_trained=settings.is_training)
    start = await on_device(device, make)
    if settings.is_training and not settings.can_start_from_reward_model:
        way_out = "name it as rollout.reward_model.adapter, or train it further with learner=reward_model"
        refuse_head(start, f"model.adapter={settings.model.adapter}", way_out)
    if settings.model.adapter is not None and (start.head is None or not settings.is_training):
        for name in adapters.policies:
            adapters.publish(dataclasses.replace(start, name=name))
    return start


def _needed_kernels(
    settings: RuntimeSettings, model: SharedModel, start: Adapter, has_task: bool
) -> list[Specialization]:
    kernels = engine_kernels(model, start, settings.engine)
    if settings.is_training:
        return kernels + learner_kernels(model, start)
    return kernels + packed_kernels(model) if has_task else kernels


def _tell_kernels(tell: Callable[[str], None], done: int, total: int) -> None:
    tell(f"preparing kernels {done}/{total}")


async def _start_engine(
    make: Callable[..., Engine],
    settings: EngineSettings,
    device: DeviceThread,
    model: SharedModel,
    adapters: AdapterTable,
    streams: DeviceStreams,
) -> AsyncEngine:
    engine = AsyncEngine(device, asyncio.get_running_loop())
    build = partial(make, model, adapters, streams, settings, emit=engine.emit, report=engine.report)
    engine.attach(await on_device(device, partial(build, async_scheduling=on_cuda())))
    if settings.warmup and model.writes_text:
        token, rows = model.tokenizer.encode("0")[-1], engine.stats().max_rows
        for name in [BASE, *(name for name in adapters.policies if adapters.resolve(name) is not None)]:
            seconds = await warm_up(engine.generate, token, model=name, rows=rows)
            logger.info("warmed up %s for up to %d rows in %.1f s", name, rows, sum(seconds.values()))
    return engine


def _check_reward_model(settings: ServerSettings) -> None:
    """Raise ConfigError if `server.reward_model` does not exist."""
    try:
        find_reward_model(RewardModelSettings(adapter=settings.reward_model))
    except AdapterError as error:
        raise ConfigError(f"server.reward_model: {error}") from error


def _publish_reward_model(settings: ServerSettings, model: SharedModel, adapters: AdapterTable) -> None:
    """Serve the reward model of `server.reward_model` as the adapter `reward`. Raises AdapterError."""
    folder = find_reward_model(RewardModelSettings(adapter=settings.reward_model))
    if folder is not None:
        adapter = read_reward_model(folder, model)
        adapters.publish(dataclasses.replace(adapter, name=REWARD, version=max(1, adapter.version)))


def _rates(has_own: bool, of_policies: Mapping[str, RewardModel]) -> dict[str, Rate]:
    """Return the reward models of rollouts by their names for clients: `POLICY@reward`, or `reward` if it is the only
    one and there is no adapter of this name."""
    named = {f"{policy}@{REWARD}": model.rate for policy, model in of_policies.items()}
    return dict(zip((REWARD,), named.values(), strict=True)) if len(named) == 1 and not has_own else named
