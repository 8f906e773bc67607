"""What serving and training have in common: the device thread, the model, the engine, the table of versions, HTTP."""

import asyncio
import dataclasses
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.device.blas import BlasReport, set_blas_threads
from parallm.device.governor import Governor
from parallm.device.lanes import Lanes
from parallm.device.memory import wire_memory
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.kv_memory import max_rows
from parallm.engine.settings import EngineSettings
from parallm.engine.warm_up import warm_up
from parallm.metrics.run_header import RunHeader
from parallm.metrics.wording import short_path
from parallm.model.adapter import Adapter
from parallm.model.adapter_table import AdapterTable
from parallm.model.cuda import on_cuda
from parallm.model.load import load_shared_model
from parallm.model.reward_head import is_reward_model, refuse_reward_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.starting_adapter import starting_adapter
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.control.witnesses import Witness
from parallm.server.operation.keys import StoredKey, read_keys
from parallm.server.operation.listen import HttpServer
from parallm.server.operation.request_log import writing_request_log
from parallm.server.operation.sockets import bind
from parallm.server.operation.traces import exporting_traces
from parallm.server.service import Training, Trajectories
from parallm.server.settings import ServerSettings
from parallm.types import BASE, POLICY

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseSettings:
    """What a command asks for."""

    model: ModelSettings
    engine: EngineSettings
    server: ServerSettings = ServerSettings(enabled=False)
    policies: tuple[str, ...] = (POLICY,)
    """Names under which clients find what is trained, or the given adapter."""
    seed: int = 0
    """For a new adapter."""
    engine_share: float = 0.5
    """Share of device seconds that a learner leaves to serving."""
    can_start_from_reward_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """An address that clients can connect to, though nothing answers yet."""

    bound: socket.socket
    keys: tuple[StoredKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One of each."""

    device: DeviceThread
    lanes: Lanes
    model: SharedModel
    adapters: AdapterTable
    engine: AsyncEngine
    start: Adapter
    """The version to go on from: the given adapter, or one whose product is zero."""

    def of(self, name: str) -> "House":
        """The same, for training the policy `name`."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, name=name))


@contextmanager
def listening(settings: ServerSettings) -> Iterator[Listening | None]:
    """Bind the port, so that a wrong address costs no time; None without a server. Raises ListenError, ConfigError."""
    if not settings.enabled:
        yield None
        return
    keys = read_keys(settings)
    with bind(settings) as bound:
        yield Listening(bound=bound, keys=keys)


async def with_house(
    settings: HouseSettings,
    blas: BlasReport,
    listens: Listening | None,
    status: Callable[[], TrainingStatus],
    work: Callable[[House, HttpServer | None], Awaitable[None]],
    *,
    trained: tuple[str, ...] = (),
    training: Training | None = None,
    trajectories: Mapping[str, Trajectories] | None = None,
    witnesses: Mapping[str, Witness] | None = None,
) -> None:
    """Build what `work` needs, run it, and take everything down again. `work` starts the server once what it serves is
    what it says; clients that come before wait.

    `trained` are the policies whose versions `work` makes, `training` is what clients may do to it, `trajectories`
    take what clients want to be learned from, by policy, and `witnesses` remember what a policy has answered.
    """
    device = DeviceThread(Governor(serving_share=settings.engine.serving_share, engine_share=settings.engine_share))
    server: HttpServer | None = None
    resources = ExitStack()
    try:
        resources.enter_context(writing_request_log(settings.server.request_log))
        traces = resources.enter_context(exporting_traces(settings.server.otlp_endpoint))
        house = await _build_house(settings, blas, device, is_trained=bool(trained))
        if listens is not None:
            app = create_app(
                engine=house.engine,
                tokenizer=house.model.tokenizer,
                catalog=house.adapters.cards,
                status=status,
                settings=settings.server,
                base_name=settings.model.path,
                policies=house.adapters.policies,
                keys=listens.keys,
                traces=traces,
                device_seconds=lambda: {str(work): seconds for work, seconds in device.governor.seconds.items()},
                adapters=_adapter_store(settings.server, house, trained=trained),
                training=training,
                trajectories=trajectories,
                witnesses=witnesses,
                swaps=house.adapters.num_swaps,
            )
            server = HttpServer(app, listens.bound, settings.server)
        resources.enter_context(_frozen_heap())
        await work(house, server)
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


def _adapter_store(settings: ServerSettings, house: House, *, trained: tuple[str, ...]) -> AdapterStore:
    return AdapterStore(
        house.device,
        house.model,
        house.adapters,
        root=settings.adapters_root,
        max_bytes=settings.max_adapter_bytes,
        max_names=settings.max_adapters,
        trained=trained,
    )


async def _build_house(settings: HouseSettings, blas: BlasReport, device: DeviceThread, *, is_trained: bool) -> House:
    engine = AsyncEngine(device, asyncio.get_running_loop())
    await on_device(device, wire_memory)
    model = await on_device(device, partial(load_shared_model, settings.model))
    lanes = await on_device(device, lambda: Lanes(partial(set_blas_threads, blas)))
    adapters = AdapterTable(policies=settings.policies)
    begin = partial(starting_adapter, settings.model, model, settings.seed, is_trained=is_trained)
    start = await on_device(device, begin)
    if not settings.can_start_from_reward_model:
        way_out = "name it as rollout.reward_model.adapter, or train it further with learner=reward_model"
        refuse_reward_model(start, f"model.adapter={settings.model.adapter}", way_out)
    if settings.model.adapter is not None and not is_reward_model(start):
        for name in adapters.policies:
            adapters.publish(dataclasses.replace(start, name=name))
    build = partial(Engine, model, adapters, lanes, settings.engine, emit=engine.emit, report=engine.report)
    core = await on_device(device, partial(build, runs_ahead=on_cuda()))
    engine.attach(core)
    if settings.engine.warmup:
        adapted = [name for name in adapters.policies if adapters.resolve(name) is not None]
        await _warm_up(settings.engine, engine, model, [BASE, *adapted])
    return House(device=device, lanes=lanes, model=model, adapters=adapters, engine=engine, start=start)


async def _warm_up(settings: EngineSettings, engine: AsyncEngine, model: SharedModel, names: Sequence[str]) -> None:
    token, rows = model.tokenizer.encode("0")[-1], max_rows(settings)
    for name in names:
        seconds = await warm_up(engine.generate, token, model=name, rows=rows)
        logger.info("warmed up %s for up to %d rows in %.1f s", name, rows, sum(seconds.values()))


async def on_device(device: DeviceThread, function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(device.call(function))
