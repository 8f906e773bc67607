"""ServeConfig -> a server: the wiring of `parallm.serve`."""

import asyncio
import sys

from parallm.config import ServeConfig
from parallm.device.blas import BlasReport
from parallm.given_model import find_given
from parallm.house import House, HouseSettings, header_of, listening, with_house
from parallm.interrupts import until_signal
from parallm.metrics.display import make_display
from parallm.operators import check_given
from parallm.reports import TrainingStatus
from parallm.run_folder import RUNS_FOLDER
from parallm.server.operation.listen import HttpServer
from parallm.types import POLICY


def run_serving(config: ServeConfig, blas: BlasReport) -> int:
    """Answer HTTP until Ctrl-C. Returns the exit code; raises ParallmError."""
    asyncio.run(_serve(config, blas))
    return 0


async def _serve(config: ServeConfig, blas: BlasReport) -> None:
    display = make_display("lines" if config.metrics.display == "auto" else config.metrics.display, sys.stdout)
    given = {} if config.model.adapter is None else {POLICY: f"model.adapter={config.model.adapter}"}
    check_given(config.server.adapters, given)
    settings = HouseSettings(
        model=find_given(config.model),
        engine=config.engine,
        server=config.server,
        folder=RUNS_FOLDER / config.name,
        goes_on=True,
    )

    async def work(house: House, server: HttpServer | None) -> None:
        texts = await house.restore(config.server.adapters, {})
        if server is not None:
            await server.start()
        display.start(header_of(config.name, settings.model, blas, server))
        for text in texts:
            display.message(text)
        await until_signal()

    with listening(config.server) as listens:
        try:
            await with_house(settings, blas, listens, lambda: TrainingStatus(state="serving"), work)
        finally:
            display.close()
