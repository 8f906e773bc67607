"""`/v1/session`: who asks, and what this process can do for them."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm import __version__
from parallm.server.dashboard.answers import json_answer
from parallm.server.operation.request_context import current_request
from parallm.server.service import Service


def session_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/session")
    async def session(http: Request) -> Response:
        """Name and role of the key, and what this process trains, serves and allows."""
        context = current_request.get()
        role = None if context is None else context.api_role
        return json_answer(
            http,
            {
                "role": role or "admin",  # without keys every route is open
                "key": None if context is None else context.api_key,
                "has_keys": bool(service.keys),
                "control_routes": service.settings.control_routes,
                "serves": True,
                "trains": [] if service.training is None else list(service.policies),
                "learns_live": list(service.trajectories),
                "loads_adapters": service.adapters is not None,
                "base": service.base_name,
                "max_context": service.engine.max_context,
                "run": service.watching.run_id,
                "version": __version__,
                "now": round(time.time(), 3),
            },
        )

    return router
