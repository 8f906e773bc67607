"""What serving and training have in common: the device thread, the model, the engine, the table of versions, HTTP."""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.kept_table import KeptTable
from parallm.config import RunConfig, policy_configs
from parallm.device.blas import BlasReport, set_blas_threads
from parallm.device.governor import Governor
from parallm.device.lanes import Lanes
from parallm.device.memory import wire_memory
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.kv_memory import max_rows
from parallm.engine.warm_up import warm_up
from parallm.model.adapter import Adapter
from parallm.model.adapter_table import AdapterTable
from parallm.model.cuda import on_cuda
from parallm.model.load import load_shared_model
from parallm.model.reward_head import is_reward_model, refuse_reward_model
from parallm.model.shared_model import SharedModel
from parallm.model.starting_adapter import starting_adapter
from parallm.operators import open_table, restore
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.control.witnesses import Witness
from parallm.server.operation.keys import read_keys
from parallm.server.operation.listen import HttpServer
from parallm.server.operation.request_log import writing_request_log
from parallm.server.operation.sockets import bind
from parallm.server.operation.traces import exporting_traces
from parallm.server.service import Training, Trajectories
from parallm.types import BASE, POLICY

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


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
    kept: KeptTable
    """`adapters`, with what operators have set."""
    store: AdapterStore

    async def restore(self, given: Mapping[str, str], versions: Mapping[str, int]) -> list[str]:
        """Serve what operators have left, and the adapters `given`; see `operators.restore`."""
        return await restore(self.kept, self.store, given, versions)

    def of(self, name: str) -> "House":
        """The same, for training the policy `name`."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, name=name))


async def with_house(
    config: RunConfig,
    blas: BlasReport,
    status: Callable[[], TrainingStatus],
    work: Callable[[House, HttpServer | None], Awaitable[None]],
    *,
    folder: Path | None = None,
    goes_on: bool = False,
    trained: tuple[str, ...] = (),
    training: Training | None = None,
    trajectories: Mapping[str, Trajectories] | None = None,
    witnesses: Mapping[str, Witness] | None = None,
) -> int:
    """Build what `work` needs, run it, and take everything down again. The port is bound before the model loads; `work`
    starts the server once what it serves is what it says, and clients that come before wait.

    What operators set is kept below `folder`, if there is one; `goes_on`: with what is there.
    `trained` are the policies whose versions `work` makes, `training` is what clients may do to it, `trajectories`
    take what clients want to be learned from, by policy, and `witnesses` remember what a policy has answered.
    """
    keys = read_keys(config.server) if config.server.enabled else ()
    bound = bind(config.server) if config.server.enabled else None
    device = DeviceThread(Governor(serving_share=config.engine.serving_share, engine_share=config.learner.engine_share))
    server: HttpServer | None = None
    house: House | None = None
    resources = ExitStack()
    try:
        resources.enter_context(writing_request_log(config.server.request_log))
        traces = resources.enter_context(exporting_traces(config.server.otlp_endpoint))
        house = await _build_house(config, blas, device, folder, trained=trained, goes_on=goes_on)
        if bound is not None:
            app = create_app(
                engine=house.engine,
                tokenizer=house.model.tokenizer,
                catalog=house.adapters.cards,
                status=status,
                settings=config.server,
                base_name=config.model.path,
                policies=house.adapters.policies,
                keys=keys,
                traces=traces,
                device_seconds=lambda: {str(work): seconds for work, seconds in device.governor.seconds.items()},
                adapters=house.store,
                training=training,
                trajectories=trajectories,
                witnesses=witnesses,
                swaps=house.adapters.num_swaps,
            )
            server = HttpServer(app, bound, config.server)
        await work(house, server)
    finally:
        if server is not None:
            await server.stop()
        elif bound is not None:
            bound.close()
        if house is not None:
            house.kept.close()
        device.stop()
        resources.close()
    return 0


async def _build_house(
    config: RunConfig,
    blas: BlasReport,
    device: DeviceThread,
    folder: Path | None,
    *,
    trained: tuple[str, ...],
    goes_on: bool,
) -> House:
    engine = AsyncEngine(device, asyncio.get_running_loop())
    await on_device(device, wire_memory)
    model = await on_device(device, partial(load_shared_model, config.model))
    lanes = await on_device(device, lambda: Lanes(partial(set_blas_threads, blas)))
    adapters = AdapterTable(policies=tuple(config.policies) or (POLICY,))
    start = await on_device(device, partial(starting_adapter, config.model, model, config.seed))
    if any(one.learner.trains == "policy" for one in policy_configs(config).values()):
        way_out = "name it as rollout.reward_model.adapter, or train it further with learner=reward_model"
        refuse_reward_model(start, f"model.adapter={config.model.adapter}", way_out)
    if config.model.adapter is not None and not is_reward_model(start):
        for name in adapters.policies:
            adapters.publish(dataclasses.replace(start, name=name))
    build = partial(Engine, model, adapters, lanes, config.engine, emit=engine.emit, report=engine.report)
    core = await on_device(device, partial(build, runs_ahead=on_cuda()))
    engine.attach(core)
    if config.engine.warmup:
        adapted = [name for name in adapters.policies if adapters.resolve(name) is not None]
        await _warm_up(config, engine, model, [BASE, *adapted])
    kept = open_table(config.server, folder, device, model, adapters, trained=trained, goes_on=goes_on)
    store = AdapterStore(
        device,
        model,
        kept,
        root=config.server.adapters_root,
        max_bytes=config.server.max_adapter_bytes,
        max_names=config.server.max_adapters,
    )
    return House(
        device=device,
        lanes=lanes,
        model=model,
        adapters=adapters,
        engine=engine,
        start=start,
        kept=kept,
        store=store,
    )


async def _warm_up(config: RunConfig, engine: AsyncEngine, model: SharedModel, names: Sequence[str]) -> None:
    token, rows = model.tokenizer.encode("0")[-1], max_rows(config.engine)
    for name in names:
        seconds = await warm_up(engine.generate, token, model=name, rows=rows)
        logger.info("warmed up %s for up to %d rows in %.1f s", name, rows, sum(seconds.values()))


async def on_device(device: DeviceThread, function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(device.call(function))
