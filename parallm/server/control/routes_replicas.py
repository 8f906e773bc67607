"""Routes by which a trainer on another machine samples here: it joins, sends versions, asks for completions, leaves."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable
from parallm.server.connection import body_of, json_response, uploaded
from parallm.server.control.replica_schemas import JoinBody, LeaveBody, SampleBody, SampledCompletion
from parallm.server.failures import Draining, failure_of
from parallm.server.generation import EventStream, encode_events
from parallm.server.interfaces import ReplicaHost
from parallm.server.schemas import Done
from parallm.server.service import Service
from parallm.types import Completion

ALIVE_SECONDS = 2.0
"""Longest silence of a stream; a trainer takes a server that is silent for much longer for lost."""
ALIVE = b": alive\n\n"


def replica_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/replica/join")
    async def join(http: Request) -> Response:
        """Sample for a trainer from now on. Refused for another base, tokenizer or protocol, and beside another run."""
        body = await body_of(service, http, JoinBody)
        is_paused = service.gateway.is_paused or _is_draining(http)
        return json_response(await _host(service).join(body, is_paused=is_paused))

    @router.put("/v1/replica/versions/{version}")
    async def receive(version: int, session: str, http: Request) -> Response:
        """Take one version of the policy as safetensors, under the trainer's own number."""
        async with uploaded(service, http) as content:
            return json_response(await _host(service).receive(session, version, content))

    @router.post("/v1/replica/generate")
    async def generate(http: Request) -> Response:
        """Sample completions of token ids; each is an event as soon as it ends, with the digest of its version."""
        body = await body_of(service, http, SampleBody)
        if _is_draining(http):
            raise Draining("the server shuts down and takes no new requests")
        digests = _host(service).digests(body.session)
        source = service.gateway.completions(body.request())

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(_with_pauses(source)) as completions:
                async for completion in completions:
                    yield ALIVE if completion is None else encode_events([SampledCompletion.of(completion, digests)])

        return EventStream(
            events(),
            source,
            name=body.request_id,
            stall_seconds=service.settings.stall_seconds,
            failed=lambda error: encode_events([failure_of(error).answer]),
        )

    @router.post("/v1/replica/leave")
    async def leave(http: Request) -> Response:
        """End a session. The versions stay, and operators may change the policy's name again."""
        _host(service).leave((await body_of(service, http, LeaveBody)).session)
        return json_response(Done(status="ok"))

    return router


def _is_draining(http: Request) -> bool:
    """Return whether the server is about to end; a key of the role training is not refused before a route."""
    return bool(http.app.state.drain.is_draining)


def _host(service: Service) -> ReplicaHost:
    if service.replica is None:
        raise Unavailable("this process trains a policy of its own; `python -m parallm.serve` samples for a trainer")
    return service.replica


async def _with_pauses(source: AsyncGenerator[Completion, None]) -> AsyncGenerator[Completion | None, None]:
    """Yield the completions, and None whenever there was none for `ALIVE_SECONDS`."""
    following: asyncio.Task[Completion | None] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(_next(source))
            await asyncio.wait((following,), timeout=ALIVE_SECONDS)
            if not following.done():
                yield None
                continue
            completion, following = following.result(), None
            if completion is None:
                return
            yield completion
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _next(source: AsyncGenerator[Completion, None]) -> Completion | None:
    return await anext(source, None)
