"""ServeConfig -> the session of a model, with the wiring of `parallm.serve`. Imports MLX."""

import asyncio
from collections.abc import Callable

from parallm.config.process_log import logging_to
from parallm.config.run_folder import RUNS_FOLDER
from parallm.config.schema import ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.library.local import LocalClient
from parallm.library.loop_thread import Main
from parallm.library.session import Session
from parallm.run.operator_state import AUTO
from parallm.run.runtime import Runtime
from parallm.run.serve import checked, serve
from parallm.server.operation.http_server import HttpServer, local_only

__all__ = ["release_memory", "serving"]


def serving(config: ServeConfig, blas: BlasReport) -> Main[Session]:
    """What a runtime runs to serve without training."""

    async def main(start: Callable[[Session], None], end: asyncio.Event) -> None:
        async def work(runtime: Runtime, _: HttpServer | None) -> None:
            await runtime.restore(config.server.adapters, {})
            assert runtime.app is not None, "it was built to answer"
            local = LocalClient(runtime.app)
            session = Session(app=runtime.app, local=local, settings=config.server, give=runtime.store.give)
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
