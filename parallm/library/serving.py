"""ServeConfig -> the session of a model, with the wiring of `parallm.serve`. Imports MLX."""

import asyncio
import dataclasses
from collections.abc import Callable

from parallm.build_serving import serve
from parallm.config import ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.given_model import find_given
from parallm.house import House, Listening
from parallm.library.local import LocalClient
from parallm.library.runtime import Main
from parallm.library.session import Session
from parallm.server.operation.keys import read_keys
from parallm.server.operation.listen import HttpServer
from parallm.server.settings import ServerSettings

__all__ = ["release_memory", "serving"]


def serving(config: ServeConfig, blas: BlasReport) -> Main[Session]:
    """What a runtime runs to serve without training."""

    async def main(start: Callable[[Session], None], end: asyncio.Event) -> None:
        async def work(house: House, _: HttpServer | None) -> None:
            session = session_of(house, config.server)
            try:
                start(session)
                await end.wait()
            finally:
                await session.close()

        found = dataclasses.replace(config, model=find_given(config.model))
        await serve(found, blas, Listening(bound=None, keys=read_keys(config.server)), work)

    return main


def session_of(house: House, settings: ServerSettings) -> Session:
    assert house.app is not None, "it was built to answer"
    return Session(
        app=house.app,
        local=LocalClient(house.app),
        settings=settings,
        give=house.store.give if hasattr(house, "store") else None,
    )
