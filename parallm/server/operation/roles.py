"""Who may use which route: the one table, and the check of keys."""

from collections.abc import Iterable, Mapping
from typing import Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request

from parallm.server.failures import NotAllowed, WrongKey
from parallm.server.operation.keys import StoredKey, find_key, presented_key
from parallm.server.operation.request_context import current_request
from parallm.server.settings import KeyRole, ServerSettings

Role = Literal["public"] | KeyRole

ROLES: Mapping[str, Role] = {
    "GET /health": "public",
    "GET /ready": "public",
    "GET /metrics": "inference",
    "GET /models": "inference",
    "GET /v1/metrics": "inference",
    "GET /v1/models": "inference",
    "GET /v1/models/{name}": "inference",
    "GET /get_model_info": "inference",
    "GET /get_weight_version": "inference",
    "GET /get_world_size": "inference",
    "GET /get_world_size/": "inference",
    "GET /health_generate": "inference",
    "GET /is_paused": "inference",
    "GET /model_info": "inference",
    "GET /v1/adapters": "inference",
    "GET /v1/queue": "inference",
    "GET /v1/queue/stats": "inference",
    "GET /v1/shares": "inference",
    "GET /v1/splits": "inference",
    "GET /v1/trajectories": "inference",
    "GET /weight_info": "inference",
    "POST //generate": "inference",
    "POST /detokenize": "inference",
    "POST /generate": "inference",
    "POST /generate/": "inference",
    "POST /inference/v1/generate": "inference",
    "POST /tokenize": "inference",
    "POST /v1/requests/{request_id}/cancel": "inference",
    "POST /v1/rewards": "inference",
    "POST /v1/rewards/score": "inference",
    "POST /v1/chat/completions": "inference",
    "POST /v1/completions": "inference",
    "POST /v1/responses": "inference",
    "POST /v1/trajectories/{trajectory_id}/reward": "inference",
    "GET /debug/training": "training",
    "GET /v1/training/status": "training",
    "POST /training/checkpoint": "training",
    "POST /v1/training/checkpoint": "training",
    "POST /v1/training/pause": "training",
    "POST /v1/training/resume": "training",
    "POST /v1/training/update": "training",
    "DELETE /v1/adapters/{model}": "admin",
    "DELETE /v1/adapters/{name}/aliases/{alias}": "admin",
    "DELETE /v1/splits/{name}": "admin",
    "GET /flush_cache": "admin",
    "POST /abort_request": "admin",
    "POST /abort_requests": "admin",
    "POST /areal_continue_generation": "admin",
    "POST /areal_pause_generation": "admin",
    "POST /continue_generation": "admin",
    "POST /finish_weight_update": "admin",
    "POST /flush_cache": "admin",
    "POST /init_communicator/": "admin",
    "POST /init_weight_transfer_engine": "admin",
    "POST /init_weights_update_group": "admin",
    "POST /load_adapter": "admin",
    "POST /load_lora_adapter": "admin",
    "POST /load_lora_adapter_from_tensors": "admin",
    "POST /model/switch-lora": "admin",
    "POST /pause": "admin",
    "POST /pause_generation": "admin",
    "POST /reset_prefix_cache": "admin",
    "POST /resume": "admin",
    "POST /skyrl/v1/load_lora_adapter": "admin",
    "POST /start_weight_update": "admin",
    "POST /unload_lora_adapter": "admin",
    "POST /update_adapter_weights": "admin",
    "POST /update_named_param/": "admin",
    "POST /update_weights": "admin",
    "POST /update_weights_from_disk": "admin",
    "POST /update_weights_from_distributed": "admin",
    "POST /update_weights_from_tensor": "admin",
    "POST /upload_adapter": "admin",
    "POST /v1/adapters/aliases": "admin",
    "POST /v1/adapters/load": "admin",
    "POST /v1/adapters/promote": "admin",
    "POST /v1/adapters/rollback": "admin",
    "POST /v1/load_lora_adapter": "admin",
    "POST /v1/unload_lora_adapter": "admin",
    "POST /v1/warmup": "admin",
    "PUT /v1/adapters/{name}": "admin",
    "PUT /v1/shares": "admin",
    "PUT /v1/splits/{name}": "admin",
}
"""Every route has one row; `create_app` refuses routes without."""
RANK: Mapping[Role, int] = {"public": 0, "inference": 1, "training": 2, "admin": 3}


def role_of(http: Request) -> Role:
    return ROLES[f"{http.method} {http.scope['route'].path_format}"]


def authorize(http: Request, keys: tuple[StoredKey, ...], settings: ServerSettings) -> None:
    """Let the request pass, and note the name of its key. Raises WrongKey, NotAllowed."""
    role = role_of(http)
    if role == "public":
        return
    if keys:
        _check_key(http, role, keys)
    if RANK[role] > RANK["inference"] and not settings.control_routes:
        raise NotAllowed("this route is off; the server runs with server.control_routes=false")


def check_roles(routers: Iterable[APIRouter]) -> None:
    """Raises LookupError for a route without a row in the table, so that none is open by oversight."""
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), "routers are not nested: their paths stand whole where they are defined"
            if missing := [row for row in rows_of(route) if row not in ROLES]:
                raise LookupError(f"{missing[0]} has no role; add it to server/operation/roles.py")


def rows_of(route: APIRoute) -> list[str]:
    return [f"{method} {route.path_format}" for method in sorted(route.methods or ())]


def _check_key(http: Request, role: Role, keys: tuple[StoredKey, ...]) -> None:
    presented = presented_key(http.headers)
    if presented is None:
        raise WrongKey("this server needs an API key; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
    key = find_key(presented, keys)
    if key is None:
        raise WrongKey("the API key is not one of this server's")
    if context := current_request.get():
        # before it may be refused, since the log names the key of refused requests, too
        context.api_key, context.api_role = key.name, key.role
    if RANK[key.role] < RANK[role]:
        raise NotAllowed(f"this route needs a key with the role {role}; yours has the role {key.role}")
