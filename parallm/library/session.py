"""The state behind the methods of a model: its application, a client of it in this process, and the open server."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from parallm.client import ApiError, AsyncClient
from parallm.client.calls import Call
from parallm.errors import ConfigError, InvalidRequest, Unavailable
from parallm.metrics.json_lines import read_rows
from parallm.metrics.summary import RunSummary
from parallm.server.failures import error_of
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.request_context import LOCAL
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of training one policy."""

    folder: Path
    """Folder with metrics, samples, checkpoints and adapters; see parallm/metrics/README.md."""
    steps: Sequence[Mapping[str, Any]] = field(repr=False)
    """Rows of metrics, one for each step, such as `row["reward/mean"]`."""
    evaluations: Sequence[Mapping[str, Any]] = field(repr=False)
    """Rows of evaluations, such as `row["heldout/accuracy"]`."""
    version: int
    """The newest version; 0 if no update changed the adapter."""
    best_version: int | None
    """The best version by evaluation; None without evaluations."""
    adapter: Path | None
    """Folder of the final adapter; None if no update changed it."""
    was_stopped: bool
    """Whether training was stopped before its last step."""
    policies: "Mapping[str, TrainingResult]" = field(default_factory=dict)
    """Results by policy if several are trained; the fields above are then those of the first."""


def read_result(folder: Path, *, version: int, was_stopped: bool) -> TrainingResult:
    summary = RunSummary(
        folder=folder,
        steps=read_rows(folder / "metrics.jsonl"),
        evaluations=read_rows(folder / "evaluations.jsonl"),
        peak_memory_gb=None,
    )
    adapter = folder / "adapter"
    return TrainingResult(
        folder=folder,
        steps=summary.steps,
        evaluations=summary.evaluations,
        version=version,
        best_version=None if summary.best is None else int(summary.best["heldout/version"]),
        adapter=adapter if adapter.is_dir() else None,
        was_stopped=was_stopped,
    )


ADDRESS = "http://localhost"

Result = TypeVar("Result")


class LocalClient(AsyncClient):
    """A client of the application in this process, on its event loop. Its methods raise ParallmError."""

    def __init__(self, app: ASGIApp) -> None:
        async def local(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, LOCAL: True}, receive, send)

        transport = httpx.ASGITransport(local)
        http = httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=None, trust_env=False)
        super().__init__("", http=http)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer's JSON."""
        return await self.send(Call("POST", path, lambda answer: answer, body))

    async def send(self, call: Call[Result]) -> Result:
        try:
            return await super().send(call)
        except ApiError as error:
            raise error_of(error.status, error.code, str(error), error.param) from None
        except ValueError as error:  # JSON has no infinite numbers
            raise InvalidRequest(str(error)) from error


@dataclass(slots=True, kw_only=True)
class Session:
    """The application of a loaded model. Used on the event loop of its thread."""

    app: FastAPI
    client: LocalClient
    settings: ServerSettings
    give: Callable[[str, str], Coroutine[Any, Any, AdapterCard]]
    """Serves the adapter, run or checkpoint at a path as the next version of a name."""
    server: HttpServer | None = None

    async def listen(self, host: str | None, port: int | None) -> HttpServer:
        """Answer HTTP from now on; the settings have the address if it is None.

        Raises ConfigError, ListenError, and Unavailable if a server is open already.
        """
        if self.server is not None:
            raise Unavailable(f"HTTP is answered at {self.server.url} already; close that server first")
        settings = _at(self.settings, host, port)
        self.server = server = HttpServer(self.app, bind(settings), settings)
        await server.start()
        return server

    async def stop_listening(self, server: HttpServer) -> None:
        if self.server is server:
            await server.stop()
            self.server = None

    async def close(self) -> None:
        if self.server is not None:
            await self.stop_listening(self.server)
        await self.client.close()


@dataclass(slots=True, kw_only=True)
class TrainingSession(Session):
    folder: Path
    stop: Callable[[], None]
    """Let training end after the present step. For any thread."""
    result: Future[TrainingResult]


def _at(settings: ServerSettings, host: str | None, port: int | None) -> ServerSettings:
    if not settings.enabled:
        raise ConfigError("server.enabled=false forbids to answer HTTP; leave it out to call serve()")
    try:
        return replace(
            settings, host=settings.host if host is None else host, port=settings.port if port is None else port
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{wrong['loc'][0]} is {wrong['input']!r}: {wrong['msg']}") from error
