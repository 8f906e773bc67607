"""ServeConfig -> a server: the wiring of `parallm.serve`."""

import asyncio
import dataclasses
import sys
from pathlib import Path

from parallm.config.run_folder import RUNS_FOLDER
from parallm.config.schema import ServeConfig
from parallm.device.blas import BlasReport
from parallm.interrupts import until_signal
from parallm.metrics.display import make_display
from parallm.reports import TrainingStatus
from parallm.run.operator_state import check_given
from parallm.run.runtime import Runtime, RuntimeSettings, Work, find_given, header_of, open_runtime
from parallm.server.operation.http_server import HttpServer, Listener, listening
from parallm.types import POLICY


def run_serving(config: ServeConfig, blas: BlasReport) -> int:
    """Answer HTTP until Ctrl-C. Returns the exit code; raises ParallmError."""
    asyncio.run(_serve(config, blas))
    return 0


async def _serve(config: ServeConfig, blas: BlasReport) -> None:
    config = checked(config)
    display = make_display("lines" if config.metrics.display == "auto" else config.metrics.display, sys.stdout)

    async def work(runtime: Runtime, server: HttpServer | None) -> None:
        texts = await runtime.restore(config.server.adapters, {})
        if server is not None:
            await server.start()
        display.start(header_of(config.name, config.model, blas, server))
        for text in texts:
            display.message(text)
        await until_signal()

    with listening(config.server) as listens:
        try:
            await serve(config, blas, listens, work, folder=RUNS_FOLDER / config.name)
        finally:
            display.close()


def checked(config: ServeConfig) -> ServeConfig:
    """`config` with the folder of its adapter. Raises ParallmError for what would be wrong later, before it is slow."""
    given = {} if config.model.adapter is None else {POLICY: f"model.adapter={config.model.adapter}"}
    check_given(config.server.adapters, given)
    return dataclasses.replace(config, model=find_given(config.model))


async def serve(
    config: ServeConfig, blas: BlasReport, listens: Listener | None, work: Work, *, folder: Path | None
) -> None:
    """Load the model of a configuration that is `checked`, run `work` with it, and take everything down again.

    What operators set is kept below `folder`, where there is one. Raises ParallmError.
    """
    settings = RuntimeSettings(
        model=config.model, engine=config.engine, server=config.server, folder=folder, goes_on=True
    )
    await open_runtime(settings, blas, listens, lambda: TrainingStatus(state="serving"), work)
