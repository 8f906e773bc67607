"""`/v1/batches`: files of requests, which this process answers behind all others."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from parallm.jobs.batches import Answer, Ask
from parallm.server.connection import body_of
from parallm.server.jobs.access import check_query, jobs_of, owner, read_limit, visible_to
from parallm.server.jobs.routes_files import answer
from parallm.server.jobs.schemas import BatchBody, BatchList, listed
from parallm.server.operation.request_context import LOCAL, request_traffic
from parallm.server.service import Service

MAX_BATCHES, USUAL_BATCHES = 100, 20
ADDRESS = "http://localhost"


def batch_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/batches")
    async def create(http: Request) -> Response:
        """Begin to answer the requests of a file; they wait behind those of all other clients."""
        body = await body_of(service, http, BatchBody)
        return answer(jobs_of(service).batches.create(body, owner(), visible_to()))

    @router.get("/v1/batches")
    async def batches(http: Request) -> Response:
        """Batches, the newest first."""
        query = http.query_params
        check_query(query, "after", "limit")
        limit = read_limit(query, usual=USUAL_BATCHES, largest=MAX_BATCHES)
        page = jobs_of(service).batches.page(owner=visible_to(), after=query.get("after"), limit=limit)
        return answer(BatchList.model_validate(listed(page)))

    @router.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        """How far a batch is, and the ids of its output files."""
        return answer(jobs_of(service).batches.get(batch_id, visible_to()))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        """Let a batch end; the answers so far are in its output file."""
        return answer(jobs_of(service).batches.cancel(batch_id, visible_to()))

    return router


def asking(app: ASGIApp) -> Ask:
    """Return a function that sends a request to the application without a socket, behind those of all clients."""

    async def local(scope: Scope, receive: Receive, send: Send) -> None:
        request_traffic.set("rollout")
        await app({**scope, LOCAL: True}, receive, send)

    http = httpx.AsyncClient(transport=httpx.ASGITransport(local), base_url=ADDRESS, timeout=None, trust_env=False)

    async def ask(path: str, body: Mapping[str, Any]) -> Answer:
        response = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        return Answer(response.status_code, response.headers.get("x-request-id", ""), response.json())

    return ask
