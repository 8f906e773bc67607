"""`python -m parallm.dashboard [FOLDER...]`: the page over runs on the disk, without a model. Imports no MLX."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from parallm import __version__
from parallm.config.run_folder import RUNS_FOLDER
from parallm.errors import ParallmError
from parallm.interrupts import until_signal
from parallm.metrics.run_folders import RunFolders
from parallm.metrics.watching import Watching
from parallm.server.app import create_page_app
from parallm.server.dashboard.answers import PageParts, json_answer
from parallm.server.operation.http_server import HttpServer, listening
from parallm.server.settings import ServerSettings

PORT = 8080


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Show and compare runs.")
    parser.add_argument("folders", nargs="*", type=Path, default=[RUNS_FOLDER], metavar="FOLDER")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 picks a free one")
    chosen = parser.parse_args(arguments)
    if missing := [str(folder) for folder in chosen.folders if not folder.is_dir()]:
        key = "; the port is --port PORT here" if "=" in missing[0] else ""
        parser.error(f"{missing[0]} is no folder; name a folder of runs, such as {RUNS_FOLDER}, or one run{key}")
    try:
        settings = ServerSettings(port=chosen.port)
        asyncio.run(serve(settings, chosen.folders))
    except ParallmError as error:
        sys.exit(f"parallm: {error}")


def create_app(settings: ServerSettings, folders: Sequence[Path]) -> FastAPI:
    """Return the application of the page over the runs below these folders."""
    parts = PageParts(settings=settings, watching=Watching(folders=RunFolders(folders)))
    return create_page_app(parts, [_session_routes()])


async def serve(settings: ServerSettings, folders: Sequence[Path]) -> None:
    with listening(settings) as listener:
        assert listener.bound is not None, "the server of a page is never off"
        server = HttpServer(create_app(settings, folders), listener.bound, settings)
        await server.start()
        sys.stdout.write(f"{server.url}/dashboard/ shows {', '.join(map(str, folders))} until Ctrl-C\n")
        sys.stdout.flush()
        try:
            await until_signal()
        finally:
            await server.stop()


def _session_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/v1/session")
    async def session(http: Request) -> Response:
        """A process that shows runs and does nothing else."""
        return json_answer(
            http,
            {
                "role": "admin",
                "key": None,
                "has_keys": False,
                "control_routes": False,
                "serves": False,
                "trains": [],
                "learns_live": [],
                "loads_adapters": False,
                "base": "",
                "max_context": 0,
                "run": None,
                "version": __version__,
                "now": round(time.time(), 3),
            },
        )

    return router


if __name__ == "__main__":
    main()
