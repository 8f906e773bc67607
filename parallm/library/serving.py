"""ServeConfig -> the session of a model, with the wiring of `parallm.serve`. Imports MLX."""

import asyncio
from collections.abc import Callable

from parallm.build_serving import checked, serve
from parallm.config import ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.house import House
from parallm.library.local import LocalClient
from parallm.library.runtime import Main
from parallm.library.session import Session
from parallm.operators import AUTO
from parallm.process_log import logging_to
from parallm.run_folder import RUNS_FOLDER
from parallm.server.operation.listen import HttpServer
from parallm.server.operation.listening import local_only

__all__ = ["release_memory", "serving"]


def serving(config: ServeConfig, blas: BlasReport) -> Main[Session]:
    """What a runtime runs to serve without training."""

    async def main(start: Callable[[Session], None], end: asyncio.Event) -> None:
        async def work(house: House, _: HttpServer | None) -> None:
            await house.restore(config.server.adapters, {})
            assert house.app is not None, "it was built to answer"
            local = LocalClient(house.app)
            session = Session(app=house.app, local=local, settings=config.server, give=house.store.give)
            try:
                start(session)
                await end.wait()
            finally:
                await session.close()

        own = checked(config)
        # a program's model begins as it is given, and remembers what operators set where it is told so
        folder = None if config.server.state == AUTO else RUNS_FOLDER / config.name
        with logging_to(None, config.log_level, config.log_format, on_terminal=False):
            await serve(own, blas, local_only(config.server), work, folder=folder)

    return main
