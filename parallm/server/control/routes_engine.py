"""Pause, resume, abort, caches, queue, warm-up and shares of the device: wire types and routes.

The routes stand under ParaLLM's and vLLM's names and those of SGLang and AReaL; `engine_gateway.py` does the work.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.engine.warm_up import PROMPT_TOKENS, warm_up
from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import body_of, json_response, while_connected
from parallm.server.engine_gateway import EngineGateway, PauseMode
from parallm.server.failures import UnknownRequest
from parallm.server.interfaces import Device
from parallm.server.operation.request_context import current_request
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.types import BASE

MAX_ROWS = 1024
Share = Annotated[float, Field(ge=0, le=1)]
MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "wait": "wait",
    "keep": "keep",
    "retract": "keep",  # SGLang's, as the next one; rows of ours keep their slots either way
    "in_place": "keep",
}
PAUSE_PARAMETERS = {"mode", "clear_cache"}
"""vLLM's `clear_cache` changes nothing here: the cache of a version serves that version only."""


class NoFields(Wire):
    """A body that may be empty."""


class PauseBody(Wire):
    """Body of `/pause_generation`: SGLang's names of the modes beside ours."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"


class PauseAnswer(Wire):
    status: Literal["paused", "resumed"]
    is_paused: bool


class IsPaused(Wire):
    is_paused: bool


class AbortManyBody(Wire):
    request_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=4096, fail_fast=True)
    ]


class AbortAnswer(Wire):
    status: Literal["aborted"]
    aborted: int


class AbortOneBody(Wire):
    """SGLang's."""

    rid: str = ""
    abort_all: bool = False


class QueueAnswer(Wire):
    num_running: int
    """Completions that decode now, rollouts of training included."""
    num_waiting: int
    """Requests that wait for rows."""
    num_in_flight: int
    """HTTP requests inside the engine."""
    num_held: int
    """HTTP requests that wait for `/resume`."""
    is_paused: bool


class CachesAnswer(Wire):
    success: Literal[True]


class WarmUpBody(Wire):
    model: str = Field(default=BASE, min_length=1, max_length=512)
    rows: int = Field(default=8, ge=1, le=MAX_ROWS)
    """Largest number of completions at once; the numbers before it are 1, 2, 4 and so on."""
    prompt_tokens: int = Field(default=PROMPT_TOKENS, ge=1, le=1_000_000)


class WarmUpAnswer(Wire):
    seconds: dict[str, float]
    """Seconds by the number of rows."""


def _check_target(target: float) -> float:
    if target == 0 or target >= 1:
        return target
    raise ValueError("must be at least 1, or 0 for none")


class SharesBody(Wire):
    serving_share: Share | None = None
    """Share of the engine's time for serving while rollouts run, too."""
    engine_share: Share | None = None
    """Share of the device's time for the engine while requests and an update run."""
    serving_latency_target: Annotated[float, AfterValidator(_check_target)] | None = None
    """In place of the shares: the factor, at least 1, by which other work may slow serving's tokens; 0 ends it."""


class SharesAnswer(Wire):
    serving_share: float
    engine_share: float
    serving_latency_target: float | None = None


def engine_routes(service: Service) -> APIRouter:
    router, gateway = APIRouter(), service.gateway

    @router.post("/pause")
    async def pause(http: Request) -> Response:
        """Hold new requests; `mode`: abort those that run (the usual), wait for them, or keep them frozen."""
        if unknown := http.query_params.keys() - PAUSE_PARAMETERS:
            name = min(unknown)
            raise InvalidRequest(f"unknown parameter {name[:50]!r}; send mode=abort, wait or keep", name[:50])
        mode = http.query_params.get("mode", "abort")
        if mode not in MODES:
            raise InvalidRequest(f"mode is {mode[:50]!r}; choose abort, wait or keep", "mode")
        return await _pause(http, gateway, MODES[mode])

    @router.post("/pause_generation")
    @router.post("/areal_pause_generation")
    async def pause_generation(http: Request) -> Response:
        """`/pause` as SGLang and AReaL call it."""
        body = await body_of(service, http, PauseBody)
        return await _pause(http, gateway, MODES[body.mode])

    @router.post("/resume")
    @router.post("/continue_generation")
    @router.post("/areal_continue_generation")
    async def resume(http: Request) -> Response:
        """Go on after `/pause`."""
        await body_of(service, http, NoFields)
        await gateway.resume()
        return json_response(PauseAnswer(status="resumed", is_paused=False))

    @router.get("/is_paused")
    async def is_paused() -> Response:
        """Whether `/pause` holds new requests."""
        return json_response(IsPaused(is_paused=gateway.is_paused))

    @router.post("/abort_requests")
    async def abort_requests(http: Request) -> Response:
        """End requests by their ids; they answer with what they have."""
        body = await body_of(service, http, AbortManyBody)
        return _aborted(sum([await gateway.cancel(name) for name in body.request_ids]))

    @router.post("/v1/requests/{request_id:path}/cancel")
    async def cancel(request_id: str) -> Response:
        """End one request by its id, with an admin's key or the one that it came with; it answers with what it has."""
        return _aborted(await _cancelled(service, request_id))

    @router.post("/abort_request")
    async def abort_request(http: Request) -> Response:
        """SGLang's: one request by `rid`, or all."""
        body = await body_of(service, http, AbortOneBody)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("send the rid of a request, or abort_all: true", "rid")
        return _aborted(await (gateway.cancel_all() if body.abort_all else gateway.cancel(body.rid)))

    @router.post("/reset_prefix_cache")
    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def reset_caches() -> Response:
        """Drop caches, which only save work."""
        await service.engine.reset_caches()
        return json_response(CachesAnswer(success=True))

    return router


def load_routes(service: Service) -> APIRouter:
    router, gateway = APIRouter(), service.gateway

    @router.get("/v1/queue")
    @router.get("/v1/queue/stats")
    async def queue() -> Response:
        """Numbers of running, waiting and held requests."""
        load = service.engine.stats()
        return json_response(
            QueueAnswer(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_in_flight=gateway.num_in_flight,
                num_held=gateway.num_held,
                is_paused=gateway.is_paused,
            )
        )

    @router.post("/v1/warmup")
    async def warm_up_engine(http: Request) -> Response:
        """Generate for 1, 2, 4 and more rows up to `rows`, and say how long each took; leaves nothing in caches."""
        body = await body_of(service, http, WarmUpBody)
        token = service.tokenizer.encode("0")[-1]
        work = warm_up(
            service.gateway.generate, token, model=body.model, rows=body.rows, prompt_tokens=body.prompt_tokens
        )
        seconds = await while_connected(http.receive, work)
        return json_response(WarmUpAnswer(seconds={str(rows): taken for rows, taken in seconds.items()}))

    @router.get("/v1/shares")
    async def shares() -> Response:
        """Shares of the device for serving and for the engine, while rollouts or an update run, too."""
        return json_response(SharesAnswer(**_device(service).shares()))

    @router.put("/v1/shares")
    async def set_shares(http: Request) -> Response:
        """Change shares or the latency target, from the next unit of work on until the process ends."""
        body = await body_of(service, http, SharesBody)
        changes = body.model_dump()
        if all(value is None for value in changes.values()):
            raise InvalidRequest(f"send one of {', '.join(changes)}", "serving_share")
        device = _device(service)
        device.set_shares(**changes)
        return json_response(SharesAnswer(**device.shares()))

    return router


async def _pause(http: Request, gateway: EngineGateway, mode: PauseMode) -> Response:
    await while_connected(http.receive, gateway.pause(mode))
    return json_response(PauseAnswer(status="paused" if gateway.is_paused else "resumed", is_paused=gateway.is_paused))


async def _cancelled(service: Service, request_id: str) -> int:
    """Return the number of ended requests. Raises UnknownRequest if the key has no request of this id."""
    context = current_request.get()
    assert context is not None, "middleware.py is around every request"
    if context.api_role == "admin" or (context.api_role is None and service.settings.control_routes):
        return await service.gateway.cancel(request_id)
    number = await service.gateway.cancel(request_id, api_key=context.api_key) if context.api_key else 0
    if number == 0:
        raise UnknownRequest(f"no request {request_id[:100]!r} is under way")
    return number


def _aborted(number: int) -> Response:
    return json_response(AbortAnswer(status="aborted", aborted=number))


def _device(service: Service) -> Device:
    if service.device is None:
        raise Unavailable("this process schedules no device, so it has no shares")
    return service.device
