"""The wiring of `parallm.serve`: a runtime and an application without training.

`run_serving` is for a terminal; `parallm.library` opens the application itself.
"""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from parallm.config.run_folder import RUNS_FOLDER
from parallm.config.schema import ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.settings import DeviceSettings
from parallm.distributed.identity import replica_rank
from parallm.distributed.servers import must_start_servers
from parallm.distributed.team import RANKS
from parallm.errors import ConfigError
from parallm.interrupts import until_signal
from parallm.metrics.live_display import make_display
from parallm.reports import TrainingStatus
from parallm.run.operator_state import check_given
from parallm.run.runtime import (
    Application,
    Runtime,
    RuntimeSettings,
    header_of,
    open_application,
    open_runtime,
    resolve_model,
)
from parallm.run.workers import copy_operators_state, own_server, shown_url
from parallm.server.operation.http_server import Listener, listening
from parallm.types import POLICY

logger = logging.getLogger(__name__)


def run_serving(config: ServeConfig, _: Path, blas: BlasReport) -> int:
    """Answer HTTP until Ctrl-C. Returns the exit code; raises ParallmError."""
    asyncio.run(_serve(config, blas))
    return 0


def checked(config: ServeConfig) -> ServeConfig:
    """Return `config` with the folder of its adapter. Raises ParallmError early for what would fail after loading."""
    if must_start_servers(config.distributed):
        raise ConfigError(
            f"distributed.workers={config.distributed.workers}: several servers are several processes; `python -m "
            "parallm.serve` starts them, and a Python program is one of them"
        )
    given = {} if config.model.adapter is None else {POLICY: f"model.adapter={config.model.adapter}"}
    check_given(config.server.adapters, given)
    return dataclasses.replace(config, model=resolve_model(config.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model that answers requests."""

    runtime: Runtime
    application: Application
    messages: list[str]
    """A line about each restored or given adapter."""


@asynccontextmanager
async def open_serving(
    config: ServeConfig,
    blas: BlasReport,
    listener: Listener,
    *,
    folder: Path | None,
    tell: Callable[[str], None] = logger.info,
) -> AsyncIterator[Serving]:
    """Serve the model of a configuration that is `checked`. Raises ParallmError.

    The state of operators is kept below `folder`, if there is one. `tell` shows what takes long.
    """
    settings = RuntimeSettings(
        model=config.model,
        engine=config.engine,
        device=DeviceSettings(
            serving_share=config.device.serving_share, serving_latency_target=config.device.serving_latency_target
        ),
        server=config.server,
        tasks=config.tasks,
        folder=folder,
        keeps_state=True,
    )
    async with open_runtime(settings, blas, tell) as runtime:
        messages = await runtime.restore(config.server.adapters, {})
        async with open_application(runtime, listener, lambda: TrainingStatus(state="serving")) as application:
            yield Serving(runtime=runtime, application=application, messages=messages)


def _own_config(config: ServeConfig, rank: int) -> ServeConfig:
    """The configuration of one of several servers; the first one alone shows."""
    metrics = dataclasses.replace(config.metrics, display="off") if rank else config.metrics
    return dataclasses.replace(config, server=own_server(config.server, rank), metrics=metrics)


async def _serve(config: ServeConfig, blas: BlasReport) -> None:
    rank, leader = replica_rank(), RUNS_FOLDER / config.name
    folder = leader / RANKS / str(rank) if rank else leader
    copy_operators_state(config.server, leader, folder, rank)
    config = checked(_own_config(config, rank))
    display = make_display("lines" if config.metrics.display == "auto" else config.metrics.display, sys.stdout)
    with listening(config.server) as listener, closing(display):
        async with open_serving(config, blas, listener, folder=folder, tell=display.message) as serving:
            display.start(header_of(config.name, config.model, blas, shown_url(listener.url)))
            for text in serving.messages:
                display.message(text)
            await until_signal()
