"""ASGI middleware that hands a request for a model of the catalogue to the application of that model.

It stands behind `RequestMiddleware`, and only where there is a catalogue. It reads the name that a request asks for,
leases that model until the answer has ended, and passes the request on. Names of the process's own model and of its
adapters go on to the process's own routes, byte for byte, as do requests without a name. Whoever answers compares the
name once more, so no model ever answers for another.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallm.errors import InvalidRequest, ParallmError, UnknownModel
from parallm.registry.pool import Lease, Pool
from parallm.registry.records import Named
from parallm.server.connection import BODY_SECONDS, MIN_BYTES_PER_SECOND, while_connected
from parallm.server.keep_alive import keep_alive_of
from parallm.server.model_overlays import overlaid
from parallm.server.ollama.answers import LOAD_SECONDS
from parallm.server.ollama.names import ollama_error_response
from parallm.server.operation.auth import StoredKey, authorize, deadline_of
from parallm.server.operation.middleware import Drain
from parallm.server.operation.request_context import UNIX, current_request
from parallm.server.request_limits import SECONDS_PER_BYTE, BodyBudget, WorkerPool
from parallm.server.settings import ServerSettings

LEASING = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/embeddings"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/v1/pooling"),
        *("/classify", "/v1/classify", "/v1/classifications", "/inference/v1/generate", "/tokenize", "/detokenize"),
        "/v1/predict",
        *("/api/generate", "/api/chat", "/api/embed", "/api/embeddings"),
    )
)
"""Paths whose POST asks the model of its body to work."""
OLLAMA = "/api/"


class ServedNames(Protocol):
    """The part of `Service` that the router needs."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def keys(self) -> tuple[StoredKey, ...]: ...
    @property
    def bodies(self) -> BodyBudget: ...
    @property
    def workers(self) -> WorkerPool: ...
    def serves(self, name: str) -> bool:
        """Return whether the process's own model, an adapter or a split has this name."""


class ModelRouter:
    def __init__(self, app: ASGIApp, *, service: ServedNames, pool: Pool, drain: Drain) -> None:
        self._app = app
        self._service = service
        self._pool = pool
        self._drain = drain
        has_ollama = service.settings.ollama
        self._paths = frozenset(path for path in LEASING if has_ollama or not path.startswith(OLLAMA))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except ParallmError as error:
            if not scope["path"].startswith(OLLAMA):
                raise
            await ollama_error_response(error)(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ParallmError before an answer has begun."""
        context, headers = current_request.get(), Headers(scope=scope)
        assert context is not None, "RequestMiddleware is around it"
        if not context.is_local:
            authorize("inference", headers, self._service.keys + scope.get(UNIX, ()), self._service.settings)
        context.deadline = deadline_of(headers, self._service.settings)
        if self._drain.is_draining:
            await self._app(scope, receive, send)  # which refuses it
            return
        leases: list[Lease] = []  # where a caller that is cancelled at the moment of the grant finds it
        try:
            with self._service.bodies.reserve() as grow:  # while the model loads, too: then its own budget counts
                app, scope, replayed = await self._granted(scope, receive, grow, leases)
            await app(scope, replayed, send)
        finally:
            for granted in leases:
                granted.release()

    async def _granted(
        self, scope: Scope, receive: Receive, grow: Callable[[int], None], leases: list[Lease]
    ) -> tuple[ASGIApp, Scope, Receive]:
        """Return who answers, and the request as it gets it, with its body to be read once."""
        messages = await self._read(receive, grow)
        body = await self._parsed(b"".join(message.get("body", b"") for message in messages))
        replayed: Receive = partial(_replayed, messages, receive)
        named = await self._named(body)
        if named is None or (_only_unloads(scope["path"], body) and not self._pool.is_loaded(named)):
            return self._app, scope, replayed
        lease = await while_connected(receive, self._lease(named, body, leases))
        if named.overlay is not None:
            text = json.dumps(overlaid(scope["path"], body, named.overlay)).encode()
            scope, replayed = _with_body(scope, text, receive)
        if lease.app is None:
            return self._app, scope, replayed
        return lease.app, {**scope, LOAD_SECONDS: lease.seconds}, replayed

    async def _read(self, receive: Receive, grow: Callable[[int], None]) -> deque[Message]:
        """Return the messages of the body; of one that is too long or too slow, those that came before.

        Raises EngineFull beyond the limit of all bodies.
        """
        messages = deque[Message]()
        num_bytes = 0
        begins = asyncio.get_running_loop().time()
        while not messages or messages[-1].get("more_body", False):
            try:
                async with asyncio.timeout_at(begins + BODY_SECONDS + num_bytes / MIN_BYTES_PER_SECOND):
                    messages.append(await receive())
                num_bytes += len(messages[-1].get("body", b""))
                grow(num_bytes)
            except TimeoutError:
                break
            if num_bytes > self._service.settings.max_body_bytes:
                break
        return messages

    async def _parsed(self, text: bytes) -> Mapping[str, Any]:
        """Return the object of a body; an empty one of what is no JSON, which the routes refuse."""

        def read() -> Mapping[str, Any]:
            try:
                value = from_json(text)
            except ValueError:
                return {}
            return value if isinstance(value, dict) else {}

        return await self._service.workers.run_if_long(read, seconds=len(text) * SECONDS_PER_BYTE)

    async def _named(self, body: Mapping[str, Any]) -> Named | None:
        """Return the entry of the catalogue that a request asks for; None: the process's own routes answer."""
        name = body.get("model") or body.get("name")
        if not isinstance(name, str) or self._service.serves(name) or self._service.serves(name.rpartition(":")[0]):
            return None
        try:
            return await self._pool.describe(name)
        except (UnknownModel, InvalidRequest):
            return None

    async def _lease(self, named: Named, body: Mapping[str, Any], leases: list[Lease]) -> Lease:
        leases.append(await self._pool.lease(named, keep_alive_of(body)))
        return leases[-1]


def _only_unloads(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether a request of Ollama's clients asks for nothing but that a model leaves memory."""
    asks = any(body.get(name) for name in ("prompt", "messages", "input"))
    return path.startswith(OLLAMA) and keep_alive_of(body) == 0 and not asks


async def _replayed(messages: deque[Message], receive: Receive) -> Message:
    """Return each message once, and keep none."""
    return messages.popleft() if messages else await receive()


def _with_body(scope: Scope, text: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """Return a request with another body, whose own one has been read."""
    length = (b"content-length", str(len(text)).encode())
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
    ]
    body: Message = {"type": "http.request", "body": text, "more_body": False}
    return {**scope, "headers": [*headers, length]}, partial(_replayed, deque([body]), receive)
