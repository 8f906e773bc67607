"""The wiring of `parallm.serve`: a runtime and an application without training.

`run_serving` is for a terminal; `parallm.library` opens the application itself.
"""

import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallm.config.run_folder import RUNS_FOLDER
from parallm.config.schema import ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.settings import DeviceSettings
from parallm.distributed.identity import replica_rank
from parallm.distributed.lockstep import FollowingEngine, LeadingEngine
from parallm.distributed.servers import must_start_servers
from parallm.distributed.team import RANKS, Team
from parallm.distributed.tensor_parallel import LEAVE_SECONDS, follow, load_part
from parallm.errors import ConfigError, ExchangeFailed
from parallm.interrupts import SIGNALS, until_signal
from parallm.jobs.jobs import Jobs
from parallm.metrics.live_display import make_display
from parallm.reports import TrainingStatus
from parallm.run.jobs import check_jobs, opened_jobs, working
from parallm.run.models import check_registry, open_pool
from parallm.run.operator_state import check_given
from parallm.run.runtime import (
    WHOLE,
    Application,
    EngineParts,
    Runtime,
    RuntimeSettings,
    header_of,
    open_application,
    open_runtime,
    resolve_model,
)
from parallm.run.workers import copy_operators_state, own_server, shown_url
from parallm.server.operation.http_server import Listener, listening
from parallm.server.operation.middleware import Drain
from parallm.server.operation.notify import ServiceManager
from parallm.types import POLICY

SECONDS_BETWEEN_LOOKS = 1.0

logger = logging.getLogger(__name__)


def run_serving(config: ServeConfig, _: Path, blas: BlasReport, team: Team | None = None) -> int:
    """Answer HTTP until Ctrl-C, or compute a part of a base for rank 0 of `team`. Returns the exit code; raises
    ParallmError."""
    if team is None:
        asyncio.run(_serve(config, blas))
    elif team.identity.rank == 0:
        asyncio.run(_lead(config, blas, team))
    else:
        asyncio.run(_follow(config, blas, team))
    return 0


def checked(config: ServeConfig) -> ServeConfig:
    """Return `config` with the folder of its adapter. Raises ParallmError early for what would fail after loading."""
    if must_start_servers(config.distributed):
        raise ConfigError(
            f"distributed.workers={config.distributed.workers}: several servers are several processes; `python -m "
            "parallm.serve` starts them, and a Python program is one of them"
        )
    check_jobs(config)
    check_registry(config)
    given = {} if config.model.adapter is None else {POLICY: f"model.adapter={config.model.adapter}"}
    check_given(config.server.adapters, given)
    if config.distributed.tensor_parallel > 1 and config.server.reward_model is not None:
        raise ConfigError(
            f"server.reward_model={config.server.reward_model}: a base that is divided between devices scores no "
            "texts; set distributed.tensor_parallel=1"
        )
    return dataclasses.replace(config, model=resolve_model(config.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model that answers requests."""

    runtime: Runtime
    application: Application
    messages: list[str]
    """A line about each restored or given adapter."""
    jobs: Jobs | None = None

    def idle_seconds(self) -> float:
        """Return the seconds since the last request but of views; 0 while the engine, a batch or a job is at work."""
        drain: Drain = self.application.app.state.drain
        if self.runtime.engine.stats().num_running or not (self.jobs is None or self.jobs.is_idle()):
            drain.touch()
        return drain.idle_seconds()


@asynccontextmanager
async def open_serving(
    config: ServeConfig,
    blas: BlasReport,
    listener: Listener,
    *,
    folder: Path | None,
    tell: Callable[[str], None] = logger.info,
    parts: EngineParts = WHOLE,
) -> AsyncIterator[Serving]:
    """Serve the model of a configuration that is `checked`. Raises ParallmError.

    The state of operators is kept below `folder`, if there is one. `tell` shows what takes long.
    """
    if config.distributed.tensor_parallel > 1 and parts is WHOLE:
        raise ConfigError(
            f"distributed.tensor_parallel={config.distributed.tensor_parallel}: several processes divide a base; start "
            "them by `python -m parallm.serve`"
        )
    settings = RuntimeSettings(
        model=config.model,
        engine=config.engine,
        device=DeviceSettings(
            serving_share=config.device.serving_share, serving_latency_target=config.device.serving_latency_target
        ),
        server=config.server,
        log_max_bytes=config.log_max_bytes,
        tasks=config.tasks,
        folder=folder,
        keeps_state=True,
    )
    async with open_runtime(settings, blas, tell, parts) as runtime:
        messages = await runtime.restore(config.server.adapters, {})
        status = TrainingStatus(state="serving")
        with opened_jobs(config) as jobs:
            async with (
                open_pool(config.registry, runtime, listener.keys, "this process, which serves it") as pool,
                open_application(runtime, listener, lambda: status, jobs=jobs, pool=pool) as application,
                working(jobs, config, runtime, application.app),
            ):
                yield Serving(runtime=runtime, application=application, messages=messages, jobs=jobs)


def _own_config(config: ServeConfig, rank: int) -> ServeConfig:
    """The configuration of one of several servers; the first one alone shows."""
    metrics = dataclasses.replace(config.metrics, display="off") if rank else config.metrics
    return dataclasses.replace(config, server=own_server(config.server, rank), metrics=metrics)


async def _serve(config: ServeConfig, blas: BlasReport, parts: EngineParts = WHOLE) -> None:
    rank, leader = replica_rank(), RUNS_FOLDER / config.name
    folder = leader / RANKS / str(rank) if rank else leader
    copy_operators_state(config.server, leader, folder, rank)
    config = checked(_own_config(config, rank))
    display = make_display("lines" if config.metrics.display == "auto" else config.metrics.display, sys.stdout)
    manager = ServiceManager()
    with listening(config.server) as listener, closing(display):
        async with AsyncExitStack() as stack:
            async with manager.starting(f"loading {config.model.path}"):
                opened = open_serving(config, blas, listener, folder=folder, tell=display.message, parts=parts)
                serving = await stack.enter_async_context(opened)
            display.start(header_of(config.name, config.model, blas, shown_url(listener.urls)))
            for text in serving.messages:
                display.message(text)
            engine = serving.runtime.engine
            async with manager.running(engine.ping, lambda: f"serving, {engine.stats().num_running} requests"):
                seconds = config.idle_exit_seconds
                if await until_signal(None if seconds is None else _until_idle(seconds, serving)):
                    display.message(f"no request for idle_exit_seconds={seconds:g}: leaving")


async def _until_idle(seconds: float, serving: Serving) -> bool:
    """Return True once no client has asked for anything, and no batch and no job was at work, for so long."""
    while serving.idle_seconds() < seconds:
        await asyncio.sleep(min(SECONDS_BETWEEN_LOOKS, seconds / 2))
    return True


async def _lead(config: ServeConfig, blas: BlasReport, team: Team) -> None:
    """Serve as rank 0, until a signal or the loss of another rank."""
    serving = asyncio.ensure_future(_serve(config, blas, _parts(team, LeadingEngine)))
    lost = asyncio.wrap_future(team.channel.loss())
    await asyncio.wait((serving, lost), return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        serving.cancel()
        await asyncio.wait((serving,))
        lost.result()
    lost.cancel()
    serving.result()


async def _follow(config: ServeConfig, blas: BlasReport, team: Team) -> None:
    """Make the calls of rank 0 until it ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # rank 0 gets them, too
    own_settings = dataclasses.replace(config.engine, warmup=False)
    settings = RuntimeSettings(model=resolve_model(config.model), engine=own_settings)
    async with open_runtime(settings, blas, parts=_parts(team, FollowingEngine)) as runtime:
        engine = runtime.engine.attached
        assert isinstance(engine, FollowingEngine), "the engine of these parts"
        await asyncio.to_thread(follow, runtime.device, engine, team.channel)
    if team.channel.failure is not None:
        raise ExchangeFailed(team.channel.failure)


def _parts(team: Team, engine: type[LeadingEngine] | type[FollowingEngine]) -> EngineParts:
    team.leave_seconds = LEAVE_SECONDS
    return EngineParts(load=partial(load_part, team), engine=partial(engine, channel=team.channel))
