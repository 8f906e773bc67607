"""Pause, resume, abort, caches and the queue, under ParaLLM's and vLLM's names and those of SGLang and AReaL."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.connection import body_of, json_response, while_connected
from parallm.server.control.control_bodies import (
    AbortAnswer,
    AbortManyBody,
    AbortOneBody,
    CachesAnswer,
    IsPaused,
    NoFields,
    PauseAnswer,
    PauseBody,
    QueueAnswer,
)
from parallm.server.control.steered_engine import PauseMode, SteeredEngine
from parallm.server.failures import UnknownRequest
from parallm.server.operation.request_context import current_request
from parallm.server.service import Service

MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "wait": "wait",
    "keep": "keep",
    "retract": "keep",  # of SGLang, as the next; rows of ours keep their places either way
    "in_place": "keep",
}

PAUSE_PARAMETERS = {"mode", "clear_cache"}
"""vLLM's `clear_cache` changes nothing here: what is kept of a version is of use to that version only."""


def engine_routes(service: Service, steering: SteeredEngine) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(http: Request) -> Response:
        """Hold new requests; `mode`: abort those that run (the usual), wait for them, or keep them frozen."""
        if unknown := http.query_params.keys() - PAUSE_PARAMETERS:
            name = min(unknown)
            raise InvalidRequest(f"unknown parameter {name[:50]!r}; send mode=abort, wait or keep", name[:50])
        mode = http.query_params.get("mode", "abort")
        if mode not in MODES:
            raise InvalidRequest(f"mode is {mode[:50]!r}; choose abort, wait or keep", "mode")
        return await _pause(http, steering, MODES[mode])

    @router.post("/pause_generation")
    @router.post("/areal_pause_generation")
    async def pause_generation(http: Request) -> Response:
        """`/pause` as SGLang and AReaL call it."""
        body = await body_of(service, http, PauseBody)
        return await _pause(http, steering, MODES[body.mode])

    @router.post("/resume")
    @router.post("/continue_generation")
    @router.post("/areal_continue_generation")
    async def resume(http: Request) -> Response:
        """Go on after `/pause`."""
        await body_of(service, http, NoFields)
        await steering.resume()
        return json_response(PauseAnswer(status="resumed", is_paused=False))

    @router.get("/is_paused")
    async def is_paused() -> Response:
        """Whether `/pause` holds new requests."""
        return json_response(IsPaused(is_paused=steering.is_paused))

    @router.post("/abort_requests")
    async def abort_requests(http: Request) -> Response:
        """End requests by their ids; they answer with what they have."""
        body = await body_of(service, http, AbortManyBody)
        return _aborted(sum([await steering.cancel(name) for name in body.request_ids]))

    @router.post("/v1/requests/{request_id:path}/cancel")
    async def cancel(request_id: str) -> Response:
        """End one request by its id, with an admin's key or the one that it came with; it answers with what it has."""
        return _aborted(await _cancelled(service, steering, request_id))

    @router.post("/abort_request")
    async def abort_request(http: Request) -> Response:
        """SGLang's: one request by `rid`, or all."""
        body = await body_of(service, http, AbortOneBody)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("send the rid of a request, or abort_all: true", "rid")
        return _aborted(await (steering.cancel_all() if body.abort_all else steering.cancel(body.rid)))

    @router.post("/reset_prefix_cache")
    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def reset_caches() -> Response:
        """Forget what only saves work."""
        await steering.reset_caches()
        return json_response(CachesAnswer(success=True))

    return router


def queue_routes(steering: SteeredEngine) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/queue")
    @router.get("/v1/queue/stats")
    async def queue() -> Response:
        """What runs and what waits."""
        load = steering.stats()
        return json_response(
            QueueAnswer(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_in_flight=steering.num_in_flight,
                num_held=steering.num_held,
                is_paused=steering.is_paused,
            )
        )

    return router


async def _pause(http: Request, steering: SteeredEngine, mode: PauseMode) -> Response:
    await while_connected(http.receive, steering.pause(mode))
    return json_response(
        PauseAnswer(status="paused" if steering.is_paused else "resumed", is_paused=steering.is_paused)
    )


async def _cancelled(service: Service, steering: SteeredEngine, request_id: str) -> int:
    """Return the number of ended requests. Raises UnknownRequest if the key has no request of this id."""
    context = current_request.get()
    assert context is not None, "front.py is around every request"
    if context.api_role == "admin" or (context.api_role is None and service.settings.control_routes):
        return await steering.cancel(request_id)
    number = await steering.cancel(request_id, api_key=context.api_key) if context.api_key else 0
    if number == 0:
        raise UnknownRequest(f"no request {request_id[:100]!r} is under way")
    return number


def _aborted(number: int) -> Response:
    return json_response(AbortAnswer(status="aborted", aborted=number))
